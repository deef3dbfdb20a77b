"""Settings of the lab, checked before anything is loaded."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_triforce_bench.lab.copies import NO_COPY
from vllm_triforce_bench.lab.needle import NeedleText
from vllm_triforce_bench.lab.policies import POLICIES, Full, Sizes

EXPERIMENTS = ("budget", "depth", "chunk", "recent", "refresh", "needle")
REPLAYS = ("text", "greedy", "sample")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LabSettings:
    """Settings; their options have checked ranges and choices (``command.add_arguments``).

    Raises:
        ValueError: values do not fit each other, a file is missing, or a policy does not load.
    """

    model: str
    text: tuple[Path, ...]
    output: Path
    experiments: tuple[str, ...] = EXPERIMENTS
    policies: tuple[str, ...] = tuple(name for name in POLICIES if name != Full.name)
    copies: tuple[str, ...] = (NO_COPY,)
    context: int = 16384
    contexts: tuple[int, ...] = (2048, 4096, 8192, 16384)
    budgets: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    at_budgets: tuple[int, ...] = (4096,)
    chunk_size: int = 32
    chunk_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 512)
    recent_tokens: int | None = None
    recent_shares: tuple[float, ...] = (0.05, 0.125, 0.25, 0.5, 0.75)
    refresh_interval: int = 0
    refresh_intervals: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32)
    tokens_per_pass: int = 7
    replay: str = "text"
    replay_tokens: int = 128
    stretches: int = 3
    temperature: float = 0.6
    top_p: float = 0.9
    needle: NeedleText | None = None
    needle_depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    needle_repeats: int = 3
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self._check_policies()
        if "needle" in self.experiments and self.needle is None:
            raise ValueError(
                "the needle experiment has no needle; name one with --needle, or leave it out of "
                "--experiments"
            )
        for path in self.text:
            if not path.is_file():
                raise ValueError(f"text {str(path)!r} is not a file; give a text file to replay")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output {str(self.output)!r} is a file; give a folder")
        for experiment in self.experiments:
            self.points(experiment)

    def points(self, experiment: str) -> list[tuple[str, Sizes, int]]:
        """List the policies, sizes and contexts of an experiment."""
        policies = self.policies
        if experiment in ("chunk", "recent", "refresh"):  # of retrieval alone
            policies = ("retrieval",)
        return [
            (policy, sizes, context)
            for context in (self.contexts if experiment == "depth" else (self.context,))
            for sizes in self._sizes(experiment)
            for policy in policies
        ]

    def _sizes(self, experiment: str) -> list[Sizes]:
        sizes = partial(
            Sizes,
            chunk_size=self.chunk_size,
            recent_tokens=self.recent_tokens,
            refresh_interval=self.refresh_interval,
            tokens_per_pass=self.tokens_per_pass,
        )
        try:
            if experiment == "budget":
                return [sizes(budget=budget) for budget in self.budgets]
            return [
                sizes(budget=budget, **varied)
                for budget in self.at_budgets
                for varied in self._varied(experiment, budget)
            ]
        except ValueError as error:
            raise ValueError(f"{experiment} experiment: {error}") from error

    def _varied(self, experiment: str, budget: int) -> list[dict[str, int]]:
        chunk = self.chunk_size
        if experiment == "chunk":
            return [dict(chunk_size=size) for size in self.chunk_sizes]
        if experiment == "refresh":
            return [dict(refresh_interval=interval) for interval in self.refresh_intervals]
        if experiment == "recent":
            counts = {max(1, round(share * budget / chunk)) * chunk for share in self.recent_shares}
            return [dict(recent_tokens=count) for count in sorted(counts)]
        return [{}]

    @property
    def longest_context(self) -> int:
        return max(context for e in self.experiments for _, _, context in self.points(e))

    def _check_policies(self) -> None:
        """Load the policies: one of another package may be broken."""
        for name in self.policies:
            try:
                POLICIES[name]
            except ValueError as error:
                raise ValueError(
                    f"policies: {name!r}: {error}; or name the others with --policies"
                ) from error
