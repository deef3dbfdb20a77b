"""Per-level counters of one engine.

Counters that kernels add to, and what the host knows of them.

Seconds by part of a proposal.
"""

import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum

import torch


class DeviceCounter(IntEnum):
    """Counters that the device-resident loop keeps on the device, by place in its tensor.

    Each is the field of ``LevelCounters`` with its name in lower case.
    """

    NUM_INNER_ROUNDS = 0
    NUM_LEVEL1_DRAFTED = 1
    NUM_LEVEL1_ACCEPTED = 2
    NUM_PROPOSALS = 3
    NUM_PROPOSED = 4
    NUM_LEVEL2_DRAFTED = 5
    NUM_LEVEL2_ACCEPTED = 6
    NUM_LEVEL3_REJECTIONS = 7
    NUM_LEVEL3_STEPS = 8
    NUM_NAN_REQUESTS = 9
    NUM_DIRECT_PROPOSALS = 10
    NUM_STAGED_BYTES = 11
    NUM_POOL_BLOCKS = 12
    NUM_POOL_HITS = 13
    NUM_POOL_BYTES = 14


def read_device_counters(
    values: Sequence[int],  # [len(DeviceCounter)], the tensor's
) -> dict[str, int]:
    """What the device counted, by field of ``LevelCounters``."""
    return {counter.name.lower(): values[counter] for counter in DeviceCounter}


@dataclass
class LevelCounters:
    """Sums since the engine started."""

    num_inner_rounds: int = 0
    """Requests times rounds in which they took part."""
    num_level2_passes: int = 0
    """Passes of level 2, each for all requests together; before each, level 1 drafts."""
    num_level1_drafted: int = 0
    num_level1_accepted: int = 0
    """Level 1's tokens that level 2 accepted."""
    num_proposals: int = 0
    """Requests times steps with a proposal."""
    num_level2_drafted: int = 0
    """Tokens handed up by level 2 that a full pass verified."""
    num_level2_accepted: int = 0
    """Level 2's tokens that level 3 accepted."""
    num_level3_rejections: int = 0
    """Proposals of which level 3 rejected a token."""
    num_level3_steps: int = 0
    """Requests times full passes that verified a proposal."""
    num_proposed: int = 0
    """Tokens handed up by level 2, scheduled or not."""
    num_direct_proposals: int = 0
    """Proposals of level 1 that went to the full pass without level 2; among ``num_proposals``,
    and their tokens among ``num_proposed`` and ``num_level2_drafted``."""
    num_nan_requests: int = 0
    """Requests that went on without speculation because a level's logits had a NaN."""
    num_boundary_faults: int = 0
    """Proposals that were not what level 3's test needs (``runner_v1/draft_probs.py``)."""
    num_staged_bytes: int = 0
    """Of KV in host memory that full passes read (``kernels/stage_blocks.py``), of one rank."""
    num_pool_blocks: int = 0
    """One-head blocks of layers in host memory that level 2 was to read, proposal by proposal."""
    num_pool_hits: int = 0
    """Of those, that were on the device from the proposal before (``kernels/refill_pool.py``)."""
    num_pool_bytes: int = 0
    """Brought to the device of those that were not."""
    time_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by part of ``propose()``."""

    def add_time(self, part: str, seconds: float) -> None:
        self.time_seconds[part] = self.time_seconds.get(part, 0.0) + seconds

    def add_inner_round(self, drafted: list[list[int]], num_accepted: list[int]) -> None:
        """A pass of level 2 verified these drafts."""
        self.num_level2_passes += 1
        self.num_inner_rounds += len(drafted)
        self.num_level1_drafted += sum(map(len, drafted))
        self.num_level1_accepted += sum(num_accepted)

    def add_proposal(self, token_ids: list[list[int]]) -> None:
        self.num_proposals += len(token_ids)
        self.num_proposed += sum(map(len, token_ids))

    def add_full_pass(self, num_drafted: int, num_accepted: int) -> None:
        """One request's outcome at level 3."""
        self.num_level3_steps += 1
        self.num_level2_drafted += num_drafted
        self.num_level2_accepted += num_accepted
        self.num_level3_rejections += num_accepted < num_drafted

    def add_boundary_fault(self) -> None:
        self.num_boundary_faults += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per full pass that verified a proposal, with the bonus token, as vLLM counts."""
        return 1 + _share(self.num_level2_accepted, self.num_level3_steps)

    @property
    def level1_acceptance_rate(self) -> float:
        return _share(self.num_level1_accepted, self.num_level1_drafted)

    @property
    def level2_acceptance_rate(self) -> float:
        return _share(self.num_level2_accepted, self.num_level2_drafted)

    @property
    def level2_acceptance_per_test(self) -> float:
        """Share of level 2's tokens accepted among those that level 3 got to test: tokens behind
        a rejected one are discarded untested. The paper's acceptance rate is of this kind."""
        tested = self.num_level2_accepted + self.num_level3_rejections
        return _share(self.num_level2_accepted, tested)

    def to_dict(self) -> dict:
        return {
            **asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "level1_acceptance_rate": self.level1_acceptance_rate,
            "level2_acceptance_rate": self.level2_acceptance_rate,
            "level2_acceptance_per_test": self.level2_acceptance_per_test,
        }

    def plus(self, other: "LevelCounters") -> "LevelCounters":
        """The sum of two counts."""
        mine, theirs = asdict(self), asdict(other)
        times = mine.pop("time_seconds"), theirs.pop("time_seconds")
        total = LevelCounters(**{name: mine[name] + theirs[name] for name in mine})
        for part in times[0] | times[1]:
            total.add_time(part, times[0].get(part, 0.0) + times[1].get(part, 0.0))
        return total

    def since(self, earlier: "LevelCounters") -> "LevelCounters":
        """What was added after ``earlier``, a copy of these counters."""
        mine, before = asdict(self), asdict(earlier)
        times = before.pop("time_seconds")
        mine["time_seconds"] = {
            part: seconds - times.get(part, 0.0) for part, seconds in self.time_seconds.items()
        }
        for name, value in before.items():
            mine[name] -= value
        return LevelCounters(**mine)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class DeviceCounters:
    """One worker's."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=device)
        """[len(DeviceCounter)], int64, added to."""
        self.known = LevelCounters()
        """A copy of ``sums``, at most some steps old; the host may add to it what it counts."""
        # On its way to the host, and what says that it is there.
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self) -> LevelCounters:
        """Sums so far; waits for the device."""
        counters = LevelCounters()
        _set(counters, self.sums)
        return counters

    def reset(self) -> None:
        self.sums.zero_()

    def note(self) -> None:
        """Brings ``known`` up to date with what had been counted at the last call, without a wait
        for the device."""
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
    for name, value in read_device_counters(sums.tolist()).items():
        setattr(counters, name, value)


class PartTimes:
    """Adds up what each part takes.

    On a device that runs behind the host, times are those of launching, unless ``synchronize``
    is set: then every part waits for the device, which is for measuring and costs speed.
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
