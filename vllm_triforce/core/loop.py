"""TriForce's proposal (paper, algorithm 1): the loop that both runners run."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

Rows = TypeVar("Rows")
Drafted = TypeVar("Drafted")
Logits = TypeVar("Logits")
Verified = TypeVar("Verified", covariant=True)
ItsRows = TypeVar("ItsRows", contravariant=True)
ItsDrafted = TypeVar("ItsDrafted", contravariant=True)
ItsVerified = TypeVar("ItsVerified", contravariant=True)


class Levels(Protocol[Rows, Drafted, Logits, Verified]):
    """Levels 1 and 2 of one batch: ragged in ``runner_v1/levels.py``, in fixed shapes in
    ``runner_v2/levels.py``."""

    def begin(self) -> None:
        """Level 2 chooses what it reads, and level 1 finds its place."""
        ...

    def unfinished(self) -> Rows | None:
        """The rows whose proposals are shorter than planned, ready for another round; None where
        there are none."""
        ...

    def draft(self, rows: Rows) -> Drafted:
        """Level 1: at most ``gamma`` tokens a row."""
        ...

    def forward(self, rows: Rows, drafted: Drafted) -> Logits:
        """Level 2: one sparse pass of the target over each row's newest token and its drafts."""
        ...

    def verify(self, rows: Rows, drafted: Drafted, logits: Logits) -> Verified:
        """Extends each proposal by the drafts that level 2 accepts and by one token of its own:
        recovered where it rejects one, a bonus behind the last."""
        ...

    def end(self) -> None:
        """Every proposal is as long as planned."""
        ...


class Observer(Protocol[ItsRows, ItsDrafted, ItsVerified]):
    """Times and counts, which change nothing of a proposal."""

    def part(self, name: str) -> AbstractContextManager:
        """Around a part of the loop."""
        ...

    def on_round_end(self, rows: ItsRows, drafted: ItsDrafted, verified: ItsVerified) -> None:
        """Level 2 has verified what level 1 drafted."""
        ...


def propose(
    levels: Levels[Rows, Drafted, Logits, Verified], observer: Observer[Rows, Drafted, Verified]
) -> None:
    """Level 1 drafts, level 2 verifies, until every proposal is long enough; vLLM's next step is
    level 3, which verifies the proposals in one full pass."""
    with observer.part("selection"):
        levels.begin()
    while (rows := levels.unfinished()) is not None:
        with observer.part("level 1"):
            drafted = levels.draft(rows)
        with observer.part("level 2"):
            logits = levels.forward(rows, drafted)
        with observer.part("verification"):
            verified = levels.verify(rows, drafted, logits)
        observer.on_round_end(rows, drafted, verified)
    with observer.part("verification"):
        levels.end()
