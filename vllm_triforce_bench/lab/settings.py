"""Settings of the lab, checked before anything is loaded."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from vllm_triforce_bench.lab.copies import NO_COPY, SCHEMES
from vllm_triforce_bench.lab.policies import POLICIES, Full, Sizes
from vllm_triforce_bench.options import NotNegative, Share, ShareAboveZero

VARIED = {
    "budget": ("budget", "budget, tokens"),
    "depth": ("context", "context, tokens"),
    "chunk": ("chunk_size", "chunk size, tokens"),
    "recent": ("recent_tokens", "recent tokens"),
}
"""Field of the rows that each experiment varies, and its name in tables."""
_SIZES = ("context", "chunk_size", "recent_tokens", "tokens_per_pass")
_REPLAYS = ("text", "greedy", "sample")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Replayed:
    """A replay of a recorded context, for an experiment, by a policy and a copy of the target."""

    experiment: str
    policy: str
    sizes: Sizes
    context: int
    copy: str = NO_COPY

    @property
    def label(self) -> str:
        return self.policy if self.copy == NO_COPY else f"{self.policy}, {self.copy}"


def _option(kind: Any, default: Any, help: str, choices: Iterable[str] | None = None) -> Any:
    """Make a field that is an option of the command; several values, if the default is a tuple."""
    return field(default=default, metadata={"kind": kind, "help": help, "choices": choices})


@dataclass(frozen=True)
class LabSettings:
    """Settings; the command makes its options of them and checks types, ranges and choices.

    Raises:
        ValueError: values do not fit each other, a file is missing, or a policy does not load.
    """

    model: str
    text: Sequence[Path]
    output: Path
    experiments: Sequence[str] = _option(str, tuple(VARIED), "what to vary", VARIED)
    policies: Sequence[str] = _option(
        str, tuple(p for p in POLICIES if p != Full.name), "policies to compare", POLICIES
    )
    copies: Sequence[str] = _option(
        str, (NO_COPY,), "weights of the sparse pass, by each policy", SCHEMES
    )
    context: int = _option(PositiveInt, 16384, "tokens of context, but for the depth experiment")
    contexts: Sequence[int] = _option(
        PositiveInt, (2048, 4096, 8192, 16384), "tokens of context, in the depth experiment"
    )
    budgets: Sequence[int] = _option(
        PositiveInt,
        (256, 512, 1024, 2048, 4096),
        "tokens that a policy reads, in the budget experiment",
    )
    at_budgets: Sequence[int] = _option(
        PositiveInt, (4096,), "tokens that a policy reads, in the other experiments"
    )
    chunk_size: int = _option(
        PositiveInt, 32, "tokens per retrieval chunk, but for the chunk experiment"
    )
    chunk_sizes: Sequence[int] = _option(
        PositiveInt,
        (8, 16, 32, 64, 128, 512),
        "tokens per retrieval chunk, in the chunk experiment",
    )
    recent_tokens: int | None = _option(
        int, None, "newest tokens that are kept; by default about a quarter"
    )
    recent_shares: Sequence[float] = _option(
        Share,
        (0.05, 0.125, 0.25, 0.5, 0.75),
        "shares of the budget for the newest, in the recent experiment",
    )
    tokens_per_pass: int = _option(PositiveInt, 7, "tokens that a full pass moves on by")
    replay: str = _option(str, "text", "replay the text's own tokens, or the target's", _REPLAYS)
    replay_tokens: int = _option(PositiveInt, 128, "tokens replayed in each stretch")
    stretches: int = _option(PositiveInt, 3, "stretches of text")
    temperature: float = _option(NotNegative, 0.6, "of the acceptance; 0 is greedy")
    top_p: float = _option(ShareAboveZero, 0.9, "of the acceptance")
    dtype: str = _option(str, "float32", "of weights and cache", _DTYPES)
    device: str = _option(str, "cpu", "of torch")
    seed: int = _option(int, 0, "of sampled replays")
    revision: str | None = _option(str, None, "of the model on the hub")
    trust_remote_code: bool = _option(bool, False, "run the model's own code")

    def __post_init__(self) -> None:
        for name in self.policies:  # one of another package may be broken
            try:
                POLICIES[name]
            except ValueError as error:
                raise ValueError(
                    f"policies: {name!r}: {error}; or name the others with --policies"
                ) from error
        for path in self.text:
            if not path.is_file():
                raise ValueError(f"text {str(path)!r} is not a file; give a text file to replay")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output {str(self.output)!r} is a file; give a folder")
        self.replays()

    def replays(self) -> list[Replayed]:
        """List all replays of a stretch of text.

        Raises:
            ValueError: level 2 refuses the sizes of an experiment.
        """
        replays = []
        for experiment, copy in itertools.product(self.experiments, self.copies):
            # The others vary what retrieval alone has.
            policies = self.policies if experiment in ("budget", "depth") else ("retrieval",)
            try:
                points = list(self._points(experiment))
            except ValueError as error:
                raise ValueError(f"{experiment} experiment: {error}") from error
            replays += [
                Replayed(experiment, policy, sizes, context, copy)
                for sizes, context in points
                for policy in policies
            ]
        return replays

    def _points(self, experiment: str) -> Iterator[tuple[Sizes, int]]:
        for budget in self.budgets if experiment == "budget" else self.at_budgets:
            counts = (round(share * budget / self.chunk_size) for share in self.recent_shares)
            values: dict[str, Iterable[int]] = {
                "budget": (budget,),
                "depth": self.contexts,
                "chunk": self.chunk_sizes,
                "recent": sorted({max(1, count) * self.chunk_size for count in counts}),
            }
            for value in values[experiment]:
                point = {name: getattr(self, name) for name in _SIZES}
                point |= {"budget": budget, VARIED[experiment][0]: value}
                context = point.pop("context")
                yield Sizes(**point), context

    @property
    def longest_context(self) -> int:
        return max(replay.context for replay in self.replays())

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest context, its replay, and the token after it."""
        return self.longest_context + self.replay_tokens + 1
