"""Rates and costs of a machine, from which the time of a decoding step is predicted."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, NonNegativeInt

from vllm_triforce_bench.options import (
    AboveZero,
    BadInput,
    NotNegative,
    Share,
    ShareAboveZero,
    checked,
)

_GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Rates and costs of a device and its host.

    Args:
        memory_bytes: memory of the device.
        bandwidth: peak bytes per second.
        flops: peak operations per second, in the weights' precision.
        bandwidth_share, flops_share: share of the peak that kernels reach.
        attention_bandwidth_share, attention_flops_share: share that attention reaches; 0 for the
            kernels' share.
        num_sms: multiprocessors, each with one thread block of attention; 0 without a GPU.
        splits_queries: True if attention splits a sequence's KV over thread blocks for queries of
            any length (FlashAttention 3). False if it does for one token with grouped heads only
            (FlashAttention 2 as vLLM calls it).
        launch_seconds: cost of a kernel outside CUDA graphs.
        graph_launch_seconds: cost of a CUDA graph.
        kernel_seconds: cost of a kernel in a graph and of the gap after it, beside reading and
            computing.
        upload_seconds: cost of a copy from host to device.
        sync_seconds: cost of one wait for the device.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    memory_bytes: AboveZero
    bandwidth: AboveZero
    flops: AboveZero
    bandwidth_share: ShareAboveZero = 0.85
    flops_share: ShareAboveZero = 0.6
    attention_bandwidth_share: Share = 0.0
    attention_flops_share: Share = 0.0
    num_sms: NonNegativeInt = 0
    splits_queries: bool = True
    launch_seconds: NotNegative = 0.0
    graph_launch_seconds: NotNegative = 0.0
    kernel_seconds: NotNegative = 0.0
    upload_seconds: NotNegative = 0.0
    sync_seconds: NotNegative = 0.0

    def __post_init__(self) -> None:
        if not self.splits_queries and not self.num_sms:
            raise ValueError(
                f"machine {self.name!r} has splits_queries=False and num_sms=0: the share of idle "
                "multiprocessors is unknown; give num_sms"
            )

    def occupancy(self, num_reqs: int, query_tokens: int, heads: int, kv_heads: int) -> float:
        """Share of the device that attention keeps busy.

        FlashAttention 2 in vLLM's ``varlen`` form splits a sequence's KV only for queries of one
        token with grouped heads (``seqlenq_ngroups_swapped`` in its
        ``csrc/flash_attn/flash_api.cpp``). Otherwise each head of a request is one thread block
        for every 64 query tokens.
        """
        if self.splits_queries or (query_tokens == 1 and heads > kv_heads):
            return 1.0
        num_blocks = num_reqs * heads * -(-query_tokens // 64)
        return min(1.0, num_blocks / self.num_sms)


def _gpu(
    name: str, memory_gib: float, bandwidth: float, flops: float, num_sms: int, splits: bool
) -> Machine:
    """Shares and times are those measured on an H200; launches cost the host about the same."""
    return Machine(
        name,
        memory_gib * _GIB,
        bandwidth,
        flops,
        bandwidth_share=0.86,
        attention_bandwidth_share=0.83,
        num_sms=num_sms,
        splits_queries=splits,
        launch_seconds=5e-6,
        graph_launch_seconds=15e-6,
        kernel_seconds=4.2e-6,
        upload_seconds=6e-6,
        sync_seconds=30e-6,
    )


# Peaks are the vendors' (dense, bfloat16 with float32 sums). For GPUs but the H200, shares and
# launches are assumptions (docs/doctor.md). Memory is the usable part of 141, 80, 24 and 96 GB.
MACHINES = {
    "H200": _gpu("H200", 139, 4.8e12, 989e12, 132, True),
    "A100-80GB": _gpu("A100-80GB", 79, 2.039e12, 312e12, 108, False),
    "RTX-4090": _gpu("RTX-4090", 23.5, 1.008e12, 165e12, 128, False),
    "GH200": _gpu("GH200", 94.5, 4.0e12, 989e12, 132, True),
}


def named_machine(name: str) -> Machine:
    """Return one of ``MACHINES``, or read a file with its fields in JSON.

    Raises:
        BadInput: there is neither, or a field is missing, unknown or out of range.
    """
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise BadInput(f"machine {name!r} is no file and none of {list(MACHINES)}")
    try:
        return checked(Machine)(json.loads(Path(name).read_text()))
    except (OSError, ValueError) as error:
        raise BadInput(f"{name} cannot be read: {error}") from error


def machine_of(device_name: str) -> Machine | None:
    """Return the machine of PyTorch's device name, None if there is none in ``MACHINES``."""
    words = device_name.replace("-", " ").split()  # whole words: a GH200 is no H200
    for name, machine in MACHINES.items():
        if all(part in words for part in name.split("-")):
            return machine
    return None
