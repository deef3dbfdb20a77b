"""Dense and sparse attention on vLLM's GPU backends: FLASH_ATTN, FLASHINFER and TRITON_ATTN.

At level 3 the backend's own code runs unchanged; only the queries are kept. At level 2, and in
level 1's draft, one of vLLM's paged kernels is called directly (``paged_kernels.py``):
FlashAttention where the backend is FLASH_ATTN, the Triton kernel where it is TRITON_ATTN or
FLASHINFER, whose own kernels want a plan made on the host before every pass.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from vllm_triforce.attention.gpu_impl import (
    DirectMetadata,
    SparseMetadata,
    attach,
    kernel_for,
    key_and_value,
)
from vllm_triforce.attention.paged_kernels import PagedSequences
from vllm_triforce.attention.sequence_rows import sequence_rows
from vllm_triforce.cache.one_head_blocks import OneHeadBlocks
from vllm_triforce.kernels.chunk_summaries import KeyPointers, update_chunk_summaries
from vllm_triforce.selection import Summary

# fp8_e5m2 is missing: vLLM's own dtype for fp8 views is e4m3.
_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")


class UniformStarts:
    """Query start locations of equally long sequences: buffers that graphs can rely on."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, num_seqs: int, query_len: int, device) -> torch.Tensor:  # [num_seqs + 1]
        key = (num_seqs, query_len)
        if key not in self._kept:
            starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
            self._kept[key] = starts * query_len
        return self._kept[key]


class GPUDraftAttention:
    """What level 1 needs from a GPU backend: passes of the draft over its private cache.

    Args:
        layers: the draft's ``Attention`` layers by name.
        builder: unused, as in ``GPURetrievalAttention``.

    Raises:
        ValueError: the draft's attention is not plain.
    """

    def __init__(self, layers: dict, builder) -> None:
        self._starts = UniformStarts()
        self.layer_names = list(layers)
        for name, layer in layers.items():
            impl = layer.impl
            if impl.alibi_slopes is not None or impl.sinks is not None:
                raise ValueError(
                    f"draft layer {name!r} has ALiBi or attention sinks, which level 1's window "
                    "does not fit; use another draft"
                )
            attach(layer, None, None)

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows], int32
        block_table: torch.Tensor,  # [num_rows, blocks per window], int32
        most: int,
    ) -> dict[str, DirectMetadata]:
        starts = self._starts(num_rows, query_len, seq_lens.device)
        return self._of(PagedSequences(starts, seq_lens, block_table, query_len, most))

    def ragged(self, query_start_loc, seq_lens, block_table, longest: int) -> dict:
        """A pass in which every request feeds its whole window."""
        return self._of(PagedSequences(query_start_loc, seq_lens, block_table, longest, longest))

    def _of(self, sequences: PagedSequences) -> dict[str, DirectMetadata]:
        return dict.fromkeys(self.layer_names, DirectMetadata(sequences))


class GPURetrievalAttention:
    """What level 2 needs from a GPU backend, for layers of one geometry.

    Args:
        layers: vLLM's ``Attention`` layers that retrieve, in the order of the forward pass.
        builder: unused; the kernels are called without a backend's metadata.
    """

    def __init__(self, layers: list, builder, recorder) -> None:
        self._layers = layers
        self._keys: KeyPointers | None = None
        self._starts = UniformStarts()
        self.num_kv_heads = layers[0].num_kv_heads
        for index, layer in enumerate(layers):
            attach(layer, index, recorder)

    @staticmethod
    def can_retrieve(layer) -> bool:
        """Whether a layer's attention is plain enough to be split into one-head sequences."""
        impl = layer.impl
        return (
            kernel_for(impl) is not None
            and tuple(impl.sliding_window) == (-1, -1)
            and impl.alibi_slopes is None
            and impl.sinks is None
            and impl.kv_sharing_target_layer_name is None
            and getattr(impl, "chunk_lookback", -1) == -1
            and impl.kv_cache_dtype in _KV_CACHE_DTYPES
        )

    def blocks_of(self, layer_index: int) -> OneHeadBlocks:
        layer = self._layers[layer_index]
        return OneHeadBlocks.of(*key_and_value(layer.kv_cache, layer.impl))

    def head_strides(self) -> tuple[int, int]:
        """How one-head sequences name a block of a KV head; all layers are laid out alike."""
        blocks = self.blocks_of(0)
        return blocks.per_block, blocks.per_head

    def build(
        self,
        query_lens: torch.Tensor,  # [num_reqs], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32, in the shortened tables
        block_tables: torch.Tensor,  # [num_layers, num_reqs * num_kv_heads, width], int32
    ) -> list[SparseMetadata]:
        """Metadata of one ragged level 2 pass, a layer each; only the block tables differ."""
        heads = self.num_kv_heads
        lens = query_lens.repeat_interleave(heads)
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(lens, 0, out=starts[1:])
        seq_lens = seq_lens.repeat_interleave(heads)
        longest = int(query_lens.max()), int(seq_lens.max())
        rows = sequence_rows(query_lens, heads)
        return [
            SparseMetadata(PagedSequences(starts, seq_lens, table, *longest), rows=rows)
            for table in block_tables
        ]

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows * num_kv_heads], int32, in the shortened tables
        block_tables: torch.Tensor,  # [num_layers, num_rows * num_kv_heads, width], int32
    ) -> list[SparseMetadata]:
        """Metadata of a level 2 pass of ``query_len`` tokens a row, on the given buffers."""
        starts = self._starts(num_rows * self.num_kv_heads, query_len, seq_lens.device)
        most = block_tables.shape[2] * self._layers[0].kv_cache.shape[2]
        return [
            SparseMetadata(PagedSequences(starts, seq_lens, table, query_len, most), query_len)
            for table in block_tables
        ]

    def update_summaries(
        self,
        summaries: Mapping[Summary, torch.Tensor],  # [num_layers, num_kv_heads, num_blocks, dim]
        tables: torch.Tensor,  # [num_reqs, width], int32, block tables
        first: torch.Tensor,  # [num_reqs], int32, logical block to begin with
        last: torch.Tensor,  # [num_reqs], int32, logical block to stop before
        max_blocks: int,
    ) -> None:
        """Summarises blocks that became full."""
        if self._keys is None:
            layers = self._layers
            keys = [key_and_value(layer.kv_cache, layer.impl)[0] for layer in layers]
            is_quantized = keys[0].dtype.itemsize == 1
            scales = [layer._k_scale_float if is_quantized else 1.0 for layer in layers]
            self._keys = KeyPointers(keys, scales)
        for kind, written in summaries.items():
            update_chunk_summaries(self._keys, kind, written, tables, first, last, max_blocks)

    def block_summaries(self) -> list[Callable[[torch.Tensor, Summary], torch.Tensor]]:
        """For each layer, a function from block ids [n] and a kind to
        [n, num_kv_heads, head_dim]."""
        return [partial(self._summary_of, layer) for layer in self._layers]

    def _summary_of(self, layer, block_ids: torch.Tensor, kind: Summary) -> torch.Tensor:
        keys, _ = key_and_value(layer.kv_cache, layer.impl)
        found = kind.of(keys[block_ids].float(), 1)
        return found * layer._k_scale_float if keys.dtype.itemsize == 1 else found
