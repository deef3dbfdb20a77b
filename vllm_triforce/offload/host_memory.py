"""Host memory that the device reads and writes at its own addresses.

How fast the device reads host memory.
"""

import time
import weakref

import torch

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.kernels.stage_blocks import stage_blocks
from vllm_triforce.metrics.counters import DeviceCounter

_SENTINEL = 0x5A
_MOST_BYTES = 64 << 20


class HostMemory:
    """Zeros in host memory, pinned where the device is a GPU, until this is gone.

    Pinned by registering it, as vLLM does (vllm/v1/simple_kv_offload/cuda_mem_ops.py): torch's own
    rounds up to a power of two.

    Raises:
        MemoryError: there is not as much.
        RuntimeError: what the device sees is not that memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        what = "the KV cache in host memory"
        with checked_allocation(what, num_bytes, torch.device("cpu"), "lower kv_offload_gib"):
            self._memory = torch.zeros(num_bytes, dtype=torch.int8)
        self.view = self._memory
        """[num_bytes], int8, as the device sees it."""
        if device.type == "cpu":
            return
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
        from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

        with checked_allocation(
            what, num_bytes, device, "lower kv_offload_gib, or raise `ulimit -l`"
        ):
            pin_tensor(self._memory)
            unpin = torch.cuda.cudart().cudaHostUnregister
            weakref.finalize(self, unpin, self._memory.data_ptr())
            self.view = get_accelerator_view_from_cpu_tensor(self._memory)
        _check_alias(self._memory, self.view)


def _check_alias(memory: torch.Tensor, view: torch.Tensor) -> None:
    """Memory that is not registered can silently yield a copy."""
    for place in (0, len(memory) - 1):
        memory[place] = _SENTINEL
        seen = int(view[place].item())
        view[place] = 0
        if seen != _SENTINEL or view[place].item() or memory[place]:  # item() waits for the device
            raise RuntimeError(
                "kv_offload_gib: the device does not see the host's memory, but a copy of it. "
                "Check that memory can be pinned here (`ulimit -l`), or drop kv_offload_gib."
            )


def measure_bandwidth(host: torch.Tensor, staging: torch.Tensor) -> float:
    """Bytes a second by which a layer's blocks are staged: some of them are, twice.

    Args:
        host, staging: [num_blocks, num_kv_heads, block_size, size], as ``stage_blocks`` has them.
    """
    page = host.stride(0) * host.element_size()
    num_blocks, block_size = min(len(host), max(1, _MOST_BYTES // page)), host.shape[2]
    tables = torch.arange(num_blocks, dtype=torch.int32, device=staging.device)[None]
    seq_lens = torch.tensor([num_blocks * block_size], dtype=torch.int32, device=staging.device)
    counters = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=staging.device)

    def staged() -> float:
        _wait(staging.device)
        begin = time.perf_counter()
        stage_blocks(host, staging, tables, seq_lens, block_size, counters)
        _wait(staging.device)
        return time.perf_counter() - begin

    staged()  # compiles the kernel
    return num_blocks * page / staged()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
