"""Level 2's attention on a GPU, over the buffers of a pass of a fixed shape."""

from collections.abc import Mapping, Sequence

import torch

from vllm_triforce.attention.base import LayerSelection, RetrievalAttention
from vllm_triforce.attention.gpu.backends import backend_of, key_and_value, supported_backends
from vllm_triforce.attention.gpu.impl import attach
from vllm_triforce.attention.gpu.paged_kernels import SparseSequences, uniform_starts
from vllm_triforce.cache.one_head_blocks import ChunkIds, OneHeadBlocks
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.config.budget import chunk_size
from vllm_triforce.config.checks import KV_CACHE_DTYPES
from vllm_triforce.kernels.retrieval import KeyPointers, update_chunk_summaries
from vllm_triforce.selection import Summary


class GPURetrievalAttention(RetrievalAttention):
    """Attention over vLLM's paged kernels, called without a backend's metadata."""

    def __init__(self, layers: list, builder, offloads=None) -> None:
        super().__init__(layers, builder, offloads)
        self._keys: KeyPointers | None = None

    @staticmethod
    def chunk_size(block_size: int) -> int:
        return chunk_size(block_size)

    @staticmethod
    def can_retrieve(layer) -> bool:
        impl = layer.impl
        return (
            backend_of(impl) is not None
            and tuple(impl.sliding_window) == (-1, -1)
            and impl.alibi_slopes is None
            and impl.kv_sharing_target_layer_name is None
            and getattr(impl, "chunk_lookback", -1) == -1
            and impl.kv_cache_dtype in KV_CACHE_DTYPES
        )

    def has_static_metadata(self, builder) -> bool:
        return any(
            type(builder) is backend.builder_cls and not backend.plans_on_host
            for backend in supported_backends()
        )

    def attach(self, layer, index: int, offload=None) -> None:
        attach(layer, index, offload)

    def chunk_ids(self) -> ChunkIds:
        """Return the first layer's: all layers are laid out alike."""
        first = self.layers[0]
        keys, values = key_and_value(first.kv_cache, first.impl)
        return OneHeadBlocks.of(keys, values, chunk_size(keys.shape[1])).ids

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows * num_kv_heads], int32, in the shortened tables
        block_tables: Sequence[torch.Tensor],  # each [num_rows * num_kv_heads, width], int32
        selection: LayerSelection | None = None,
    ) -> list[SparseSequences]:
        starts = uniform_starts(num_rows * self.num_kv_heads, query_len, seq_lens.device)
        max_len = block_tables[0].shape[1] * chunk_size(self.layers[0].kv_cache.shape[2])
        schedules: dict = {}
        return [
            SparseSequences(
                starts, seq_lens, table, query_len, max_len, selection, schedules=schedules
            )
            for table in block_tables
        ]

    def update_summaries(
        self,
        summaries: Mapping[Summary, QuantizedSummaries],
        tables: torch.Tensor,  # [num_reqs, width], int32, block tables
        first: torch.Tensor,  # [num_reqs], int32, logical block to begin with
        last: torch.Tensor,  # [num_reqs], int32, logical block to stop before
        max_blocks: int,
    ) -> None:
        if self._keys is None:
            layers = self.layers
            keys = [key_and_value(layer.kv_cache, layer.impl)[0] for layer in layers]
            is_quantized = keys[0].dtype.itemsize == 1
            scales = [layer._k_scale_float if is_quantized else 1.0 for layer in layers]
            self._keys = KeyPointers(keys, scales, chunk_size(keys[0].shape[1]))
        for kind, kept in summaries.items():
            update_chunk_summaries(self._keys, kind, kept, tables, first, last, max_blocks)
