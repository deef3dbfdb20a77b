"""Host memory that the device addresses, and the bandwidth at which it is read."""

import time
import weakref

import torch

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.kernels.stage_blocks import stage_blocks
from vllm_triforce.metrics.counters import DeviceCounter

_SENTINEL = 0x5A
_MAX_MEASURED_BYTES = 64 << 20


class HostMemory:
    """Zeroed host memory, pinned on a GPU for the lifetime of this object.

    Memory is pinned by ``cudaHostRegister``, as in vLLM
    (vllm/v1/simple_kv_offload/cuda_mem_ops.py). ``torch``'s
    pinned allocator would round up to a power of two.

    Raises:
        MemoryError: too little memory is available, or it cannot be pinned.
        RuntimeError: the device sees a copy of the memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        purpose = "the KV cache in host memory"
        with checked_allocation(purpose, num_bytes, torch.device("cpu"), "lower kv_offload_gib"):
            self._memory = torch.zeros(num_bytes, dtype=torch.int8)
        self.view = self._memory
        """[num_bytes], int8, as the device addresses it."""
        if device.type == "cpu":
            return
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
        from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

        with checked_allocation(
            purpose, num_bytes, device, "lower kv_offload_gib, or raise `ulimit -l`"
        ):
            pin_tensor(self._memory)
            unpin = torch.cuda.cudart().cudaHostUnregister
            weakref.finalize(self, unpin, self._memory.data_ptr())
            self.view = get_accelerator_view_from_cpu_tensor(self._memory)
        _check_alias(self._memory, self.view)


def _check_alias(memory: torch.Tensor, view: torch.Tensor) -> None:
    """Check that writes through either tensor are visible through the other.

    Raises:
        RuntimeError: ``view`` is a copy, as it silently is for memory that is not registered.
    """
    for index in (0, len(memory) - 1):
        memory[index] = _SENTINEL
        value = int(view[index].item())
        view[index] = 0
        if value != _SENTINEL or view[index].item() or memory[index]:  # item() synchronizes
            raise RuntimeError(
                "kv_offload_gib: the device does not see the host's memory, but a copy of it. "
                "Check that memory can be pinned here (`ulimit -l`), or drop kv_offload_gib."
            )


def measure_bandwidth(host: torch.Tensor, staging: torch.Tensor) -> float:
    """Measure bytes a second of ``stage_blocks`` over at most 64 MiB of a layer.

    Args:
        host, staging: [num_blocks, num_kv_heads, block_size, size]; ``staging`` is written.
    """
    page = host.stride(0) * host.element_size()
    num_blocks, block_size = min(len(host), max(1, _MAX_MEASURED_BYTES // page)), host.shape[2]
    tables = torch.arange(num_blocks, dtype=torch.int32, device=staging.device)[None]
    seq_lens = torch.tensor([num_blocks * block_size], dtype=torch.int32, device=staging.device)
    counters = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=staging.device)

    def stage_s() -> float:
        _synchronize(staging.device)
        begin = time.perf_counter()
        stage_blocks(host, staging, tables, seq_lens, block_size, counters)
        _synchronize(staging.device)
        return time.perf_counter() - begin

    stage_s()  # compiles the kernel
    return num_blocks * page / stage_s()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
