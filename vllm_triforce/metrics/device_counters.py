"""Counters that kernels add to, and what the host knows of them."""

import torch

from vllm_triforce.metrics.counters import DeviceCounter, LevelCounters, read_device_counters


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
