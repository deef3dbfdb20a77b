"""Host memory that the device reads and writes at its own addresses."""

import torch

from vllm_triforce.cache.allocation import allocating

_SENTINEL = 0x5A


def allocate_host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros in host memory, as the device sees them: pinned where that is a GPU.

    Pinned by registering it, as vLLM does (vllm/v1/simple_kv_offload/cuda_mem_ops.py): torch's own
    rounds up to a power of two.

    Returns:
        [num_bytes], int8. It keeps the host's memory.

    Raises:
        MemoryError: there is not as much.
        RuntimeError: what the device sees is not that memory.
    """
    what = "the KV cache in host memory"
    with allocating(what, num_bytes, torch.device("cpu"), "lower kv_offload_gib"):
        memory = torch.zeros(num_bytes, dtype=torch.int8)
    if device.type == "cpu":
        return memory
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    with allocating(what, num_bytes, device, "lower kv_offload_gib, or raise `ulimit -l`"):
        pin_tensor(memory)
        view = get_accelerator_view_from_cpu_tensor(memory)
    _check_alias(memory, view)
    return view


def _check_alias(memory: torch.Tensor, view: torch.Tensor) -> None:
    """Memory that is not registered can silently yield a copy."""
    for place in (0, len(memory) - 1):
        memory[place] = _SENTINEL
        seen = int(view[place].item())
        view[place] = 0
        if seen != _SENTINEL or view[place].item() or memory[place]:  # item() waits for the device
            raise RuntimeError(
                "kv_offload_gib: the device does not see the host's memory, but a copy of it; "
                "check that memory can be pinned here (`ulimit -l`), or drop kv_offload_gib"
            )
