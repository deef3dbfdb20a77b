"""Work that the device does beside the pass that runs."""

from collections.abc import Callable
from typing import Protocol

import torch


class SideStream(Protocol):
    """A second stream of the device's work. In a CUDA graph the two are branches of it."""

    def run(self, launch: Callable[[], None]) -> None:
        """What ``launch`` launches runs behind all that was launched before, on either stream,
        and beside what the main stream is given after."""
        ...

    def join(self) -> None:
        """What the main stream is given after waits for all of this one's."""
        ...


class DeviceSideStream:
    """Of a GPU. Waits are by events, as vLLM's own prefetches have it
    (vllm/model_executor/offloader/prefetch.py), so that graphs may have them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, launch: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


class NoSideStream:
    """Of a device that has one stream alone, as the CPU: all is done in order."""

    def run(self, launch: Callable[[], None]) -> None:
        launch()

    def join(self) -> None:
        pass


def side_stream_of(device: torch.device) -> SideStream:
    return NoSideStream() if device.type == "cpu" else DeviceSideStream(device)
