"""The loop of TriForce (paper, algorithm 1). Both model runners run it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


def propose(levels: "Levels", observer: "Observer") -> None:
    """Draft with level 1 and verify with level 2 until every proposal is as long as planned.

    Level 3 is vLLM's next step, which verifies the proposals in one full pass.

    Both tests follow speculative sampling (arXiv 2211.17192). Let p1 be level 1's distribution at
    a position and p2 level 2's. A draft token x is accepted with probability min(1, p2(x) / p1(x)).
    The first rejected token is replaced by one drawn from norm(max(p2 - p1, 0)), and the row's
    round ends. If all drafts are accepted, a bonus token is drawn from p2. Each token of the
    proposal is then distributed as p2, and level 3 repeats the test with its own p3 and this p2.
    Draft tokens without a distribution have a one-hot p1. p2 may depend on earlier tokens only,
    not on the draft that it tests.
    """
    with observer.part("selection"):
        levels.begin()
    while (rows := levels.unfinished()) is not None:
        with observer.part("level 1"):
            draft = levels.draft(rows)
        with observer.part("level 2"):
            logits = levels.forward(rows, draft)
        with observer.part("verification"):
            verified = levels.verify(rows, draft, logits)
        observer.on_round_end(rows, draft, verified)
    with observer.part("verification"):
        levels.end()


class Levels(Protocol):
    """Levels 1 and 2 of one batch.

    ``runner_v1/levels.py`` has ragged rows, ``runner_v2/speculator.py`` fixed shapes. Each runner
    has its own types of rows, drafts, logits and results, which the loop only passes on.
    """

    def begin(self) -> None:
        """Select the KV blocks of level 2 and align the window of level 1."""

    def unfinished(self) -> Any | None:
        """Return the rows whose proposals are shorter than planned, None if there are none."""

    def draft(self, rows: Any) -> Any:
        """Draft at most ``gamma`` tokens per row with level 1."""

    def forward(self, rows: Any, draft: Any) -> Any:
        """Compute level 2's logits of each row's newest token and drafts, in one sparse pass."""

    def verify(self, rows: Any, draft: Any, logits: Any) -> Any:
        """Extend each proposal by its accepted drafts and one recovered or bonus token."""

    def end(self) -> None:
        """Finish the proposals."""


class Observer:
    """Times and counts the loop. It changes no proposal; by default it does nothing."""

    def part(self, name: str) -> AbstractContextManager:
        """Enclose a part of the loop: ``selection``, ``level 1``, ``level 2``, ``verification``."""
        return nullcontext()

    def on_round_end(self, rows: Any, draft: Any, verified: Any) -> None:
        """Observe the result of a round."""
