"""The KV cache of an engine whose last layers lie in host memory."""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_triforce.cache.allocation import allocating
from vllm_triforce.core.private_cache import allocate_layers
from vllm_triforce.kernels.stage_blocks import stage_blocks
from vllm_triforce.offload.bandwidth import measure_bandwidth
from vllm_triforce.offload.host_memory import HostMemory
from vllm_triforce.offload.placement import Placement


class OffloadedCache:
    """What lies where. The staging layer has the shape of one layer's cache and the same block ids,
    so that block tables, slots and attention's metadata stay vLLM's.

    Args:
        placement: which layers lie on the device.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.host_layer_names: list[str] = []
        self.staging: torch.Tensor | None = None
        """[num_blocks, num_kv_heads, block_size, size], one layer's at a time."""
        self._memory: HostMemory | None = None
        self._first: torch.Tensor | None = None
        self._spec: Any = None

    def allocate(
        self,
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """In the place of vLLM's (vllm/v1/worker/utils.py): by layer, [num_blocks, num_kv_heads,
        block_size, size], those in host memory as the device sees it.

        Raises:
            ValueError: layers are not one kind, or neither they nor their blocks lie one behind
                the other.
        """
        tensor = _only_tensor(kv_cache_config, layout)
        self._spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        on_device = tensor.layers[: self.placement.num_device_layers]
        self.host_layer_names = tensor.layers[self.placement.num_device_layers :]
        caches = {}
        if on_device:
            caches = _allocate(
                kv_cache_config, tensor, on_device, device, layout, kernel_block_sizes
            )
        (self.staging,) = _allocate(
            kv_cache_config, tensor, self.host_layer_names[:1], device, layout, kernel_block_sizes
        ).values()
        part = _part(tensor, self.host_layer_names)
        self._memory = HostMemory(part.size, device)
        views = create_kv_cache_views(
            self._memory.view,
            self._spec,
            kv_cache_config.num_blocks,
            layout,
            part,
            kernel_block_size=kernel_block_sizes[0] if kernel_block_sizes else None,
        )
        self._first = views[0]
        return caches | dict(zip(self.host_layer_names, views))

    def bandwidth(self) -> float:
        """Bytes a second from host memory, measured; for a KV cache in which is nothing yet."""
        assert self._first is not None and self.staging is not None
        return measure_bandwidth(self._first, self.staging)

    def allocate_pools(
        self, num_blocks: int, vllm_config, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Level 2's blocks of each layer in host memory, by name, laid out as its KV cache."""
        assert self._spec is not None
        names = self.host_layer_names
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        with allocating(
            f"level 2's pool of {len(names)} layers in host memory",
            len(names) * self._spec.page_size_bytes * num_blocks,
            device,
            "lower max_speculating_seqs or retrieval_budget",
        ):
            return allocate_layers(names, self._spec, num_blocks, layout, device)

    def of_layer(self, pool: torch.Tensor, counters: torch.Tensor) -> "HostLayer":
        """For the attention of the layer with this pool."""
        assert self.staging is not None
        return HostLayer(self.staging, pool, counters)


class HostLayer:
    """What attention reads in the place of one layer in host memory.

    Args:
        pool: [num_slots * width, num_kv_heads, block_size, size], what level 2 reads and writes.
        counters: [len(DeviceCounter)], int64, added to.
    """

    def __init__(self, staging: torch.Tensor, pool: torch.Tensor, counters: torch.Tensor) -> None:
        self._staging = staging
        self._counters = counters
        self.pool = pool

    def staged(
        self,
        host: torch.Tensor,  # the layer's KV cache
        block_table: torch.Tensor,  # [num_reqs, width], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
    ) -> torch.Tensor:
        """The same KV cache on the device, as far as these requests read it. The pass has written
        its own keys and values to host memory before."""
        stage_blocks(host, self._staging, block_table, seq_lens, host.shape[2], self._counters)
        return self._staging


def _only_tensor(kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> KVCacheTensor:
    groups, tensors = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
    if len(groups) != 1 or len(tensors) != 1:
        raise ValueError(
            f"kv_offload_gib: the target's layers are of {len(groups)} kinds, and one is staged "
            "for all; use a model with full attention in every layer, or drop kv_offload_gib"
        )
    if not (layout.is_layer_compact and layout.is_block_compact):
        raise ValueError(
            f"kv_offload_gib with KV cache layout {layout.name}: a block of a layer does not lie "
            "in one piece there, and has to be staged by itself; set VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    return tensors[0]


def _part(tensor: KVCacheTensor, names: list[str]) -> KVCacheTensor:
    return replace(tensor, size=len(names) * tensor.layer_stride, layers=names, offset=0)


def _allocate(kv_cache_config, tensor, names, device, layout, kernel_block_sizes):
    part = replace(kv_cache_config, kv_cache_tensors=[_part(tensor, names)])
    return allocate_kv_cache(part, device, layout, kernel_block_sizes)
