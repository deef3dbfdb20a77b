"""Indices of the device counters for kernels: ``NUM_...`` of ``DeviceCounter`` as constexpr."""

from typing import Any

from vllm.triton_utils import tl

from vllm_triforce.metrics.counters import DeviceCounter

globals().update({counter.name: tl.constexpr(int(counter)) for counter in DeviceCounter})


def __getattr__(name: str) -> Any:
    """Declare the constants above for type checkers."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
