"""How fast the device reads host memory."""

import time

import torch

from vllm_triforce.kernels.stage_blocks import stage_blocks
from vllm_triforce.metrics.counters import DeviceCounter

_MOST_BYTES = 64 << 20


def measure_bandwidth(host: torch.Tensor, staging: torch.Tensor) -> float:
    """Bytes a second by which a layer's blocks are staged: some of them are, twice.

    Args:
        host, staging: [num_blocks, num_kv_heads, block_size, size], as ``stage_blocks`` has them.
    """
    page = host.stride(0) * host.element_size()
    num_blocks, block_size = min(len(host), max(1, _MOST_BYTES // page)), host.shape[2]
    tables = torch.arange(num_blocks, dtype=torch.int32, device=staging.device)[None]
    seq_lens = torch.tensor([num_blocks * block_size], dtype=torch.int32, device=staging.device)
    query_start_loc = torch.zeros(2, dtype=torch.int32, device=staging.device)
    counters = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=staging.device)

    def staged() -> float:
        _wait(staging.device)
        begin = time.perf_counter()
        stage_blocks(host, staging, tables, seq_lens, query_start_loc, block_size, counters)
        _wait(staging.device)
        return time.perf_counter() - begin

    staged()  # compiles the kernel
    return num_blocks * page / staged()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
