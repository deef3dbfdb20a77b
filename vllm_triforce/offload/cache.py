"""KV cache of an engine whose last layers lie in host memory."""

from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.core.draft_cache import allocate_layers
from vllm_triforce.kernels.stage_blocks import stage_blocks
from vllm_triforce.offload.host_memory import HostMemory, measure_bandwidth
from vllm_triforce.offload.placement import Placement


class HostLayer:
    """One layer's KV cache in host memory, as attention reads it (``attention/base.py``).

    Args:
        host: [num_blocks, num_kv_heads, block_size, size], as the device sees it.
        staging: the same shape and strides, on the device; shared by all layers.
        counters: [len(DeviceCounter)], int64, added to.
        pool: [num_slots * width, num_kv_heads, block_size, size], blocks that level 2 reads and
            writes; None where level 2 never runs.
    """

    def __init__(
        self,
        host: torch.Tensor,
        staging: torch.Tensor,
        counters: torch.Tensor,
        pool: torch.Tensor | None,
    ) -> None:
        self.staging = staging
        self.pool = pool
        self._host = host
        self._counters = counters

    def stage(
        self,
        block_table: torch.Tensor,  # [num_reqs, width], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
    ) -> torch.Tensor:
        """Copy the blocks that these requests read to the staging layer, and return it.

        The pass has already written this layer's new keys and values to host memory. The staging
        layer has the same block ids, so block tables and attention metadata stay vLLM's.
        """
        block_size = self._host.shape[2]
        # Stream order suffices: the previous layer's attention has read the staging layer by now.
        stage_blocks(self._host, self.staging, block_table, seq_lens, block_size, self._counters)
        return self.staging


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
            ValueError: layers differ in kind, or the layout is not compact by layer and block.
        """
        tensor = _only_tensor(kv_cache_config, layout)
        self._spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
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
        """Measure bytes a second from host memory; overwrites the staging layer."""
        return measure_bandwidth(self.hosts[0], self._staging)

    def allocate_pools(
        self, num_blocks: int, vllm_config, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Allocate level 2's blocks of each host layer, by name, in the KV cache's layout."""
        layer_names = self.host_layer_names
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        with checked_allocation(
            f"level 2's pool of {len(layer_names)} layers in host memory",
            len(layer_names) * self._spec.page_size_bytes * num_blocks,
            device,
            "lower max_speculating_seqs or retrieval_budget",
        ):
            return allocate_layers(layer_names, self._spec, num_blocks, layout, device)

    def make_host_layers(
        self, pools: dict[str, torch.Tensor], counters: torch.Tensor
    ) -> dict[str, HostLayer]:
        """Make the host layers that attention reads, by layer name.

        Args:
            pools: result of ``allocate_pools``; empty where level 2 never runs.
            counters: [len(DeviceCounter)], int64, added to.
        """
        return {
            layer_name: HostLayer(host, self._staging, counters, pools.get(layer_name))
            for layer_name, host in zip(self.host_layer_names, self.hosts)
        }

    def check_attached(self, layer_names: list[str]) -> None:
        """Check that the layers that retrieve end with the host layers.

        Args:
            layer_names: layers whose attention level 2 replaces, in the model's order.

        Raises:
            ValueError: the host layers are not the last of ``names``.
        """
        offloaded = self.host_layer_names
        if layer_names[-len(offloaded) :] != offloaded:
            raise ValueError(
                f"kv_offload_gib: layers {offloaded[0]!r} to {offloaded[-1]!r} lie in host memory, "
                f"but level 2's last sparse layer is {layer_names[-1]!r}. Drop kv_offload_gib."
            )


def _only_tensor(kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> KVCacheTensor:
    groups, tensors = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
    if len(groups) != 1 or len(tensors) != 1:
        raise ValueError(
            f"kv_offload_gib is not supported with {len(groups)} kinds of KV cache in the target: "
            "all layers share one staging layer. Use a model with full attention in every layer."
        )
    if not (layout.is_layer_compact and layout.is_block_compact):
        raise ValueError(
            f"kv_offload_gib is not supported with KV cache layout {layout.name}: a layer's block "
            "is not in one piece. Use VLLM_KV_CACHE_LAYOUT=LBNHC."
        )
    return tensors[0]


def _subset(tensor: KVCacheTensor, layer_names: list[str]) -> KVCacheTensor:
    return replace(
        tensor, size=len(layer_names) * tensor.layer_stride, layers=layer_names, offset=0
    )
