"""Seconds by part of a proposal."""

import time
from contextlib import contextmanager

import torch


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
