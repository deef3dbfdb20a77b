"""KV cache of an engine whose last layers lie in host memory."""

import weakref
from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_triforce.attention.base import HostLayer
from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.core.calibration import PassTimer
from vllm_triforce.core.models import allocate_layers
from vllm_triforce.metrics.counters import DeviceCounter
from vllm_triforce.offload.placement import Placement

_MAX_MEASURED_BYTES = 64 << 20


class OffloadedCache:
    """KV cache of the first layers on the device, of the others in host memory.

    Args:
        placement: which layers lie where.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.host_layer_names: list[str] = []
        self.hosts: list[torch.Tensor] = []
        """One for each host layer, [num_blocks, num_kv_heads, block_size, size]."""

    def allocate(
        self,
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Allocate the KV cache in place of vLLM's ``allocate_kv_cache`` (vllm/v1/worker/utils.py).

        Returns:
            By layer name [num_blocks, num_kv_heads, block_size, size]; host layers as the device
            addresses them.

        Raises:
            ValueError: the layout is not compact by layer and block.
        """
        # All layers have the same spec (``plan_offload()``), so vLLM puts them into one group.
        (group,), (tensor,) = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
        if not (layout.is_layer_compact and layout.is_block_compact):
            raise ValueError(
                f"kv_offload_gib is not supported with KV cache layout {layout.name}: a layer's "
                "block is not in one piece. Use VLLM_KV_CACHE_LAYOUT=LBNHC."
            )
        self._spec, self._layout = group.kv_cache_spec, layout
        on_device = tensor.layers[: self.placement.num_device_layers]
        self.host_layer_names = tensor.layers[self.placement.num_device_layers :]

        def allocate(layer_names: list[str]) -> dict[str, torch.Tensor]:
            subset = replace(kv_cache_config, kv_cache_tensors=[_subset(tensor, layer_names)])
            return allocate_kv_cache(subset, device, layout, kernel_block_sizes)

        caches = allocate(on_device) if on_device else {}
        (self._staging,) = allocate(self.host_layer_names[:1]).values()
        host_tensor = _subset(tensor, self.host_layer_names)
        self.memory = HostMemory(host_tensor.size, device)
        self.hosts = create_kv_cache_views(
            self.memory.view,
            self._spec,
            kv_cache_config.num_blocks,
            layout,
            host_tensor,
            kernel_block_size=kernel_block_sizes[0] if kernel_block_sizes else None,
        )
        return caches | dict(zip(self.host_layer_names, self.hosts))

    def bandwidth(self) -> float:
        """Measure bytes a second from host memory, over at most 64 MiB of a layer.

        Overwrites the staging layer.
        """
        host, device = self.hosts[0], self._staging.device
        page_bytes = host.stride(0) * host.element_size()
        num_blocks = min(len(host), max(1, _MAX_MEASURED_BYTES // page_bytes))
        tables = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
        seq_lens = torch.tensor([num_blocks * host.shape[2]], dtype=torch.int32, device=device)
        counters = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=device)
        layer = HostLayer(host, self._staging, counters, None)
        timer = PassTimer(1, min)
        if device.type != "cpu":
            timer = PassTimer(1, min, torch.accelerator.synchronize)
        return num_blocks * page_bytes / timer.seconds(layer.stage, tables, seq_lens)

    def host_layers(
        self, retrieving: list[str], num_pool_blocks: int, counters: torch.Tensor
    ) -> dict[str, HostLayer]:
        """Make the host layers that attention reads, by layer name.

        Args:
            retrieving: layers whose attention level 2 replaces, in the model's order.
            num_pool_blocks: blocks of each layer that level 2 reads; 0 where it never runs.
            counters: [len(DeviceCounter)], int64, added to.

        Raises:
            ValueError: the host layers are not the last of ``retrieving``.
        """
        names = self.host_layer_names
        if retrieving[-len(names) :] != names:
            raise ValueError(
                f"kv_offload_gib: layers {names[0]!r} to {names[-1]!r} lie in host memory, "
                f"but level 2's last sparse layer is {retrieving[-1]!r}. Drop kv_offload_gib."
            )
        pools: dict[str, torch.Tensor] = {}
        if num_pool_blocks:
            device = self._staging.device
            with checked_allocation(
                f"level 2's pool of {len(names)} layers in host memory",
                len(names) * self._spec.page_size_bytes * num_pool_blocks,
                device,
                "lower max_speculating_seqs or retrieval_budget",
            ):
                pools = allocate_layers(names, self._spec, num_pool_blocks, self._layout, device)
        return {
            name: HostLayer(host, self._staging, counters, pools.get(name))
            for name, host in zip(names, self.hosts)
        }


def _subset(tensor: KVCacheTensor, layer_names: list[str]) -> KVCacheTensor:
    return replace(
        tensor, size=len(layer_names) * tensor.layer_stride, layers=layer_names, offset=0
    )


class HostMemory:
    """Zeroed host memory, pinned on a GPU for the lifetime of this object.

    Memory is pinned by ``cudaHostRegister``, as in vLLM
    (vllm/v1/simple_kv_offload/cuda_mem_ops.py). ``torch``'s pinned allocator would round up to a
    power of two.

    Raises:
        MemoryError: too little memory is available, or it cannot be pinned.
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
