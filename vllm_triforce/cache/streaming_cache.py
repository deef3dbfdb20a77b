"""Level 1's private KV cache: a few blocks per request slot, outside vLLM's KV groups."""

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.utils import allocate_kv_cache


class StreamingCache:
    """KV of the draft's windows; independent of the context length.

    Args:
        layers: the draft's attention layers by name, all of one KV cache spec.
        window_tokens: capacity of a window.
        num_slots: requests that can have one at a time (``max_num_seqs``).
    """

    def __init__(self, layers: dict, spec, window_tokens: int, num_slots: int, layout, device):
        self.block_size = spec.block_size
        self.blocks_per_slot = -(-window_tokens // spec.block_size)
        num_blocks = num_slots * self.blocks_per_slot
        page = spec.page_size_bytes
        names = list(layers)
        self.num_bytes = page * num_blocks * len(names)
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=self.num_bytes,
                    layers=names,
                    layer_stride=page * num_blocks,
                    block_stride=page,
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
        )
        caches = allocate_kv_cache(config, device, layout, [spec.block_size])
        for name, layer in layers.items():
            layer.kv_cache = caches[name]
        self.block_table = torch.arange(num_blocks, dtype=torch.int32, device=device).view(
            num_slots, self.blocks_per_slot
        )
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, int] = {}

    def slot(self, request_id: str) -> int:
        """The request's slot, taken on first use."""
        if request_id not in self._slots:
            self._slots[request_id] = self._free.pop()
        return self._slots[request_id]

    def release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)
