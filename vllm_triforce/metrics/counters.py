"""Counters of TriForce's levels, each declared once, and the times of a proposal's parts.

A field of ``LevelCounters`` is one counter. From the fields come the device's counters and their
kernels' constants (``kernels/counters.py``), the Prometheus metrics (``vllm_patches/carrier.py``),
and the tables of docs/metrics.md (``tools/docs_tables.py``).
"""

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch

_LEVELS, _PROPOSALS = "Level by level", "Proposals"
_HEALTH, _OFFLOAD = "Health", "KV in host memory"


@dataclass(frozen=True)
class Counter:
    """Description of a counter, for Prometheus and docs/metrics.md."""

    metric: str
    """Prometheus name, after ``vllm:triforce_`` and before ``_total``."""
    section: str
    unit: str
    help: str
    is_on_device: bool = True
    """True if kernels add to it."""


def _counter(metric: str, section: str, unit: str, help: str, is_on_device: bool = True) -> Any:
    row = Counter(metric, section, unit, help, is_on_device)
    return field(default=0, metadata={"counter": row})


PROPOSE_SECONDS = Counter(
    "propose_seconds",
    _PROPOSALS,
    "seconds",
    "Time spent proposing, by the label `part`: `selection`, `level_1`, `level_2`, `verification`. "
    "On a GPU this is the time of launches",
)


@dataclass
class LevelCounters:
    """Sums since the engine started."""

    num_level1_drafted: int = _counter(
        "level1_draft_tokens", _LEVELS, "tokens", "Drafted by level 1 and verified by level 2"
    )
    num_level1_accepted: int = _counter(
        "level1_accepted_tokens", _LEVELS, "tokens", "Tokens of level 1 that level 2 accepted"
    )
    num_level2_drafted: int = _counter(
        "level2_draft_tokens",
        _LEVELS,
        "tokens",
        "Proposed tokens that a full pass verified, including direct proposals",
    )
    num_level2_accepted: int = _counter(
        "level2_accepted_tokens", _LEVELS, "tokens", "Proposed tokens that level 3 accepted"
    )
    num_level3_steps: int = _counter(
        "level3_steps", _LEVELS, "requests", "Requests whose proposal a full pass verified"
    )
    num_level3_rejections: int = _counter(
        "level3_rejections",
        _LEVELS,
        "requests",
        "Requests with a token of the proposal that level 3 rejected",
    )
    num_proposals: int = _counter(
        "proposals", _PROPOSALS, "requests", "Requests with a proposal, counted in each step"
    )
    num_direct_proposals: int = _counter(
        "direct_proposals",
        _PROPOSALS,
        "requests",
        "Of these, proposals of level 1 that skipped level 2",
    )
    num_proposed: int = _counter(
        "proposed_tokens", _PROPOSALS, "tokens", "Proposed tokens, verified or not"
    )
    num_inner_rounds: int = _counter(
        "inner_rounds", _PROPOSALS, "requests", "Requests in a round of levels 1 and 2"
    )
    num_level2_passes: int = _counter(
        "level2_passes",
        _PROPOSALS,
        "passes",
        "Passes of level 2, each for a whole batch",
        is_on_device=False,
    )
    speculative_step_seconds: float = _counter(
        "speculative_step_seconds",
        _PROPOSALS,
        "seconds",
        "Time of steps that verify proposals, counted for each request with one, and the delay of "
        "the other requests",
        is_on_device=False,
    )
    plain_step_seconds: float = _counter(
        "plain_step_seconds",
        _PROPOSALS,
        "seconds",
        "Time that plain steps take in their place, by the controller's measurements; the quotient "
        "of both is the break-even",
        is_on_device=False,
    )
    num_boundary_faults: int = _counter(
        "boundary_faults",
        _HEALTH,
        "proposals",
        "Proposals that violate level 3's requirements and are verified as one-hot tokens; the "
        "output stays exact. Counted on Runner V1",
        is_on_device=False,
    )
    num_nan_requests: int = _counter(
        "nan_requests",
        _HEALTH,
        "requests",
        "Requests that continued without speculation because a level's logits had a NaN; the "
        "output is not affected",
    )
    num_staged_bytes: int = _counter(
        "staged_bytes", _OFFLOAD, "bytes", "KV in host memory that full passes read"
    )
    num_pool_blocks: int = _counter(
        "pool_blocks", _OFFLOAD, "blocks of one head", "Blocks in host memory for level 2 to read"
    )
    num_pool_hits: int = _counter(
        "pool_hits", _OFFLOAD, "blocks of one head", "Of these, blocks that were on the device"
    )
    num_pool_bytes: int = _counter(
        "pool_bytes", _OFFLOAD, "bytes", "KV copied to the device for level 2"
    )
    time_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by part of ``propose()``."""

    def add_time(self, part: str, seconds: float) -> None:
        self.time_seconds[part] = self.time_seconds.get(part, 0.0) + seconds

    def add_step_seconds(self, speculative_s: float, plain_s: float) -> None:
        self.speculative_step_seconds += speculative_s
        self.plain_step_seconds += plain_s

    def add_inner_round(self, drafted: list[list[int]], num_accepted: list[int]) -> None:
        """Count a pass of level 2 that verified these drafts."""
        self.num_level2_passes += 1
        self.num_inner_rounds += len(drafted)
        self.num_level1_drafted += sum(map(len, drafted))
        self.num_level1_accepted += sum(num_accepted)

    def add_proposal(self, token_ids: list[list[int]]) -> None:
        self.num_proposals += len(token_ids)
        self.num_proposed += sum(map(len, token_ids))

    def add_full_pass(self, num_drafted: int, num_accepted: int) -> None:
        """Count one request's outcome at level 3."""
        self.num_level3_steps += 1
        self.num_level2_drafted += num_drafted
        self.num_level2_accepted += num_accepted
        self.num_level3_rejections += num_accepted < num_drafted

    def add_boundary_fault(self) -> None:
        self.num_boundary_faults += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per full pass with a proposal, including the bonus token, as vLLM counts."""
        return 1 + _share(self.num_level2_accepted, self.num_level3_steps)

    @property
    def break_even_tokens(self) -> float | None:
        """Tokens a step from which speculation pays; None if no step was compared."""
        if not self.plain_step_seconds:
            return None
        return self.speculative_step_seconds / self.plain_step_seconds

    @property
    def level1_acceptance_rate(self) -> float:
        return _share(self.num_level1_accepted, self.num_level1_drafted)

    @property
    def level2_acceptance_rate(self) -> float:
        return _share(self.num_level2_accepted, self.num_level2_drafted)

    @property
    def level2_acceptance_per_test(self) -> float:
        """Share of accepted tokens among those that level 3 tested, as in the paper.

        Tokens after a rejected one are discarded untested.
        """
        tested = self.num_level2_accepted + self.num_level3_rejections
        return _share(self.num_level2_accepted, tested)

    def to_dict(self) -> dict:
        rates = [name for name, value in vars(LevelCounters).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in rates}

    def plus(self, other: "LevelCounters") -> "LevelCounters":
        return self._combined(other, 1)

    def since(self, earlier: "LevelCounters") -> "LevelCounters":
        """Return the increments since ``earlier``, a copy of these counters."""
        return self._combined(earlier, -1)

    def _combined(self, other: "LevelCounters", sign: int) -> "LevelCounters":
        times, others = self.time_seconds, other.time_seconds
        parts = {
            part: times.get(part, 0.0) + sign * others.get(part, 0.0) for part in times | others
        }
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in COUNTERS}
        return LevelCounters(**sums, time_seconds=parts)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


COUNTERS: dict[str, Counter] = {
    row.name: row.metadata["counter"] for row in fields(LevelCounters) if "counter" in row.metadata
}
"""Description of each counter, by field of ``LevelCounters``."""

DeviceCounter = IntEnum(  # type: ignore[misc]
    "DeviceCounter",
    [name.upper() for name, counter in COUNTERS.items() if counter.is_on_device],
    start=0,
)
"""Index of each device counter in its tensor; a member is a field of LevelCounters, upper case."""


class DeviceCounters:
    """Counters of one worker that kernels add to."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=device)
        """[len(DeviceCounter)], int64, added to."""
        self.known = LevelCounters()
        """A copy of ``sums``, at most some steps old; the host may add its own counts."""
        # The copy on its way to the host, and the event of its arrival.
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self) -> LevelCounters:
        """Read the sums; waits for the device."""
        _set(counters := LevelCounters(), self.sums)
        return counters

    def set(self, sums: torch.Tensor) -> None:
        """Set all sums, and ``known`` with them; waits for the device."""
        self.sums.copy_(sums)
        self._copy = None  # the pending copy has the sums of before
        _set(self.known, self.sums)

    def note(self) -> None:
        """Update ``known`` with the sums of an earlier call, without waiting for the device."""
        if self.sums.device.type == "cpu":
            _set(self.known, self.sums)
            return
        if self._copy is not None and self._copy[1].query():
            _set(self.known, self._copy[0])
            self._copy = None
        if self._copy is None:
            self._copy = self.sums.to("cpu", non_blocking=True), torch.cuda.Event()
            self._copy[1].record()


def _set(counters: LevelCounters, sums: torch.Tensor) -> None:
    for counter, value in zip(DeviceCounter, sums.tolist()):
        setattr(counters, counter.name.lower(), value)


class PartTimes:
    """Sums the time of each part of a proposal.

    On an asynchronous device these are times of launches, unless ``synchronize`` is set. Then every
    part waits for the device, which is slow and meant for measurements.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.synchronize = False
        self._is_asynchronous = device.type != "cpu"

    @contextmanager
    def part(self, name: str):
        start = self._now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.synchronize and self._is_asynchronous:
            torch.accelerator.synchronize()
        return time.perf_counter()
