"""Small tensors that tests hand to kernels."""

import torch

from tests.kernels.device import DEVICE
from vllm_triforce.metrics.counters import DeviceCounter


def integers(values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def new_counters() -> torch.Tensor:
    return integers([0] * len(DeviceCounter), torch.int64)


def counted(counters: torch.Tensor) -> dict[DeviceCounter, int]:
    """What is not 0."""
    return {counter: n for counter, n in zip(DeviceCounter, counters.tolist()) if n}
