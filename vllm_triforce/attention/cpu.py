"""Attention on vLLM's CPU backend (vllm/v1/attention/backends/cpu_attn.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_triforce.attention.base import (
    DraftAttention,
    HostLayer,
    LayerSelection,
    RetrievalAttention,
    metadata_of,
    replace_impl,
)
from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.selection import Summary

# Element types that vLLM's CPU kernels store in a uint8 cache, by kv_cache_dtype.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

# Integers below this are exact in all dtypes of a KV cache: fp8_e5m2 has 3 bits of significand.
_CODES = 8


@dataclass
class SparseCPUMetadata:
    """One layer's metadata of a level 2 pass: a request is ``num_kv_heads`` one-head sequences."""

    query_start_loc: torch.Tensor  # [num_seqs + 1], int32
    seq_lens: torch.Tensor  # [num_seqs], int32
    block_table: torch.Tensor | None  # [num_seqs, width], int32, in one-head blocks
    scheduler_metadata: torch.Tensor
    rows: torch.Tensor | None
    """[num_tokens * num_kv_heads], rows of the query in the order of the sequences; None where the
    rows have this order."""
    one_head: "SparseCPUMetadata | None" = None
    """Metadata for one KV head of each request, where attention sinks differ by head: the kernel
    takes the same sinks for all sequences. Its ``block_table`` has the rows of all heads."""
    selection: LayerSelection | None = None
    """Completes the layer's block table; None where it is complete."""


class RetrievalCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's implementation, which also takes sparse metadata."""

    layer_index: int
    offload: HostLayer | None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if self.offload is not None and isinstance(metadata_of(layer), SparseCPUMetadata):
            kv_cache = self.offload.pool
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        if isinstance(attn_metadata, SparseCPUMetadata):
            if self.offload is not None:
                kv_cache = self.offload.pool
            return self._forward_sparse(layer, query, kv_cache, attn_metadata, output)
        if self.offload is not None and isinstance(attn_metadata, CPUAttentionMetadata):
            kv_cache = self.offload.stage(attn_metadata.block_table, attn_metadata.seq_lens)
        return CPUAttentionBackendImpl.forward(
            self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )

    def _forward_sparse(self, layer, query, kv_cache, metadata, output):
        if metadata.selection is not None:
            metadata.selection.select(self.layer_index, query)
        num_tokens = query.shape[0]
        group = self.num_heads // self.num_kv_heads
        num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        one_head = kv_cache.view(num_blocks * num_kv_heads, 1, 2 * block_size, -1)
        caches = one_head.chunk(2, dim=2)
        if metadata.one_head is not None and self.sinks is not None:
            self._forward_head_by_head(layer, query, caches, metadata.one_head, self.sinks, output)
            return output
        grouped = query.reshape(num_tokens * num_kv_heads, group, self.head_size)
        result = output.view(num_tokens * num_kv_heads, group, -1)
        target = result
        if metadata.rows is not None:
            grouped = grouped[metadata.rows]
            target = torch.empty_like(grouped)
        self._attend(layer, grouped, caches, target, metadata, metadata.block_table)
        if metadata.rows is not None:
            result[metadata.rows] = target
        return output

    def _forward_head_by_head(self, layer, query, caches, metadata, sinks, output) -> None:
        heads = self.num_kv_heads
        by_head = query.view(len(query), heads, -1, self.head_size).transpose(0, 1).contiguous()
        sinks = sinks.view(heads, -1).contiguous()
        target = torch.empty_like(by_head)
        for head in range(heads):
            table = metadata.block_table[head::heads].contiguous()
            self._attend(layer, by_head[head], caches, target[head], metadata, table, sinks[head])
        output.view(len(query), heads, -1, self.head_size).copy_(target.transpose(0, 1))

    def _attend(self, layer, query, caches, output, metadata, block_table, sinks=None) -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=caches[0],
            value_cache=caches[1],
            output=output,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=metadata.scheduler_metadata,
            s_aux=sinks,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )


def sequence_rows(
    query_lens: torch.Tensor,  # [num_reqs]
    num_kv_heads: int,
) -> torch.Tensor | None:  # [num_tokens * num_kv_heads]
    """Return rows of ``query.view(num_tokens * num_kv_heads, ...)`` in the order of one-head
    sequences.

    Returns:
        None where every request has one token, which leaves the order unchanged.
    """
    lens = query_lens.tolist()
    if all(n == 1 for n in lens):
        return None
    rows = torch.arange(sum(lens) * num_kv_heads).view(-1, num_kv_heads)
    return torch.cat([of_request.T.flatten() for of_request in rows.split(lens)])


def probe_key_order(
    write_block: Callable[[torch.Tensor], torch.Tensor],
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # [head_dim, block_size], int64
    """Find where a block has the numbers of each head dimension, by writing and reading blocks.

    vLLM's CPU kernels store the keys of a block transposed (``vec``), or packed in pairs for
    matrix units (``amx``). A mean along the wrong axis would silently lower acceptance, so the
    layout is probed: the kernel writes keys that encode their head dimension, which are read back
    raw.

    Args:
        write_block: stores keys [block_size, 1, head_dim] by the kernel and returns the raw block,
            block_size * head_dim numbers in any shape.
        dtype: type of the keys that ``write_block`` takes.

    Raises:
        RuntimeError: the stored block is not a permutation of the keys.
    """
    dims, weight = torch.arange(head_dim), 1
    dim_of_offset = torch.zeros(block_size * head_dim, dtype=torch.int64)
    while weight < head_dim:
        codes = dims // weight % _CODES
        keys = codes.to(dtype).expand(block_size, 1, head_dim).contiguous()
        dim_of_offset += weight * write_block(keys).reshape(-1).to(torch.int64)
        weight *= _CODES
    counts = torch.bincount(dim_of_offset.clamp(0, head_dim), minlength=head_dim + 1)
    if counts[head_dim] or not bool((counts[:head_dim] == block_size).all()):
        raise RuntimeError(
            f"the attention kernel stores blocks of {block_size} keys of {head_dim} numbers "
            "in a way that TriForce cannot read; use another attention backend"
        )
    return torch.argsort(dim_of_offset, stable=True).view(head_dim, block_size)


class CPURetrievalAttention(RetrievalAttention):
    """Attention over vLLM's CPU kernel, with ragged passes for Runner V1."""

    def __init__(self, layers: list, builder, offloads=None) -> None:
        super().__init__(layers, builder, offloads)
        first = layers[0]
        self._group = first.num_heads // first.num_kv_heads
        self._has_sinks = first.impl.sinks is not None
        self._key_order: torch.Tensor | None = None
        """[head_dim, block_size], places of a raw block's keys; None until the first summary."""

    @staticmethod
    def can_retrieve(layer) -> bool:
        impl = layer.impl
        return (
            isinstance(impl, CPUAttentionBackendImpl)
            and impl.sliding_window == -1
            and impl.alibi_slopes is None
            and impl.kv_sharing_target_layer_name is None
        )

    def attach(self, layer, index: int, offload=None) -> None:
        replace_impl(layer, RetrievalCPUAttentionImpl, layer_index=index, offload=offload)

    def chunk_ids(self) -> ChunkIds:
        """Return the ids of head-major blocks."""
        return ChunkIds(self.num_kv_heads, 1)

    def build(
        self,
        query_lens: torch.Tensor,  # [num_reqs], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32, in the shortened tables
        block_tables: Sequence[torch.Tensor],  # each [num_reqs * num_kv_heads, width], int32
        selection: LayerSelection | None = None,
    ) -> list[SparseCPUMetadata]:
        """Return each layer's metadata of a pass of Runner V1, as ``uniform()``.

        It is built once; layers differ in their block tables alone.
        """
        heads = self.num_kv_heads
        split = self._metadata(
            query_lens.repeat_interleave(heads),
            seq_lens.repeat_interleave(heads),
            sequence_rows(query_lens, heads),
            selection,
        )
        if not self._has_sinks:
            return [replace(split, block_table=table) for table in block_tables]
        one_head = self._metadata(query_lens, seq_lens, None)
        return [
            replace(split, one_head=replace(one_head, block_table=table)) for table in block_tables
        ]

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,
        block_tables: Sequence[torch.Tensor],
        selection: LayerSelection | None = None,
    ) -> list[SparseCPUMetadata]:
        query_lens = torch.full((num_rows,), query_len, dtype=torch.int32)
        lens = seq_lens[:: self.num_kv_heads].contiguous()
        return self.build(query_lens, lens, block_tables, selection)

    def _metadata(self, query_lens, seq_lens, rows, selection=None) -> SparseCPUMetadata:
        """Build metadata of sequences of one KV head, without a block table."""
        starts = list(accumulate(query_lens.tolist(), initial=0))
        query_start_loc = torch.tensor(starts, dtype=torch.int32)
        scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=self._group,
            num_kv_heads=1,
            head_dim=self._builder.head_dim,
            seq_lens=seq_lens,
            dtype=self._builder.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self._builder.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self._builder.kv_cache_dtype,
        )
        return SparseCPUMetadata(
            query_start_loc, seq_lens, None, scheduler_metadata, rows, selection=selection
        )

    def update_summaries(
        self,
        summaries: Mapping[Summary, QuantizedSummaries],
        tables: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        max_blocks: int,
    ) -> None:
        ranges = zip(tables, first.tolist(), last.tolist())
        block_ids = torch.cat([table[a:b] for table, a, b in ranges]).to(torch.int64)
        self.summarize(summaries, block_ids)

    def summarize(
        self,
        summaries: Mapping[Summary, QuantizedSummaries],
        block_ids: torch.Tensor,  # [n], int64, full blocks
    ) -> None:
        """Store the summaries of blocks, of each kind and layer."""
        for kind, kept in summaries.items():
            for index, layer in enumerate(self.layers):
                kept.write(index, block_ids, self._summary_of(layer, block_ids, kind))

    def _summary_of(
        self,
        layer,
        block_ids: torch.Tensor,  # [n], int64
        kind: Summary,
    ) -> torch.Tensor:  # [num_kv_heads, n, head_dim]
        kv_cache = layer.kv_cache
        num_blocks, num_kv_heads, block_size, width = kv_cache.shape
        if self._key_order is None:
            self._key_order = self._probe_key_order(layer)
            places = torch.arange(self._key_order.numel()).view_as(self._key_order)
            self._is_transposed = torch.equal(self._key_order, places)
        flat = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * width // 2)
        keys = flat[block_ids, :, 0]
        fp8 = FP8.get(layer.impl.kv_cache_dtype)
        if fp8 is not None:
            keys = keys.view(fp8).float()
        # [n, num_kv_heads, head_dim, block_size]
        if self._is_transposed:  # as ``vec`` stores them: no copy
            keys = keys.unflatten(-1, self._key_order.shape)
        else:
            keys = keys[..., self._key_order]
        summaries = kind.reduce(keys, -1).transpose(0, 1)
        return summaries if fp8 is None else summaries * layer._k_scale_float

    def _probe_key_order(self, layer) -> torch.Tensor:
        """Let the kernel write blocks of given keys into a scratch cache."""
        _, _, block_size, width = layer.kv_cache.shape
        head_dim, cache_dtype = width // 2, layer.kv_cache.dtype
        fp8 = FP8.get(layer.impl.kv_cache_dtype)

        def write_block(keys: torch.Tensor) -> torch.Tensor:
            scratch = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=cache_dtype)
            key_cache, value_cache = scratch.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                keys,
                torch.zeros_like(keys),
                key_cache,
                value_cache,
                torch.arange(block_size, dtype=torch.int64),
                layer.isa,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype=layer.impl.kv_cache_dtype,
            )
            return key_cache if fp8 is None else key_cache.contiguous().view(fp8).float()

        key_dtype = cache_dtype if fp8 is None else self._builder.dtype
        return probe_key_order(write_block, block_size, head_dim, key_dtype)


class CPUDraftAttention(DraftAttention):
    """Attention over vLLM's CPU kernel; the CPU runs Runner V2 in tests."""

    def ragged(
        self,
        query_start_loc: torch.Tensor,  # [num_reqs + 1], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
        block_table: torch.Tensor,  # [num_reqs, blocks per window], int32
        max_seq_len: int,
    ) -> dict[str, Any]:
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            num_reqs=len(seq_lens),
            num_actual_tokens=int(query_start_loc[-1]),
            max_query_len=int(query_start_loc.diff().max()),
            max_seq_len=max_seq_len,
            block_table_tensor=block_table,
            slot_mapping=query_start_loc,  # not read: the pass gives each layer its own
            causal=True,
        )
        return dict.fromkeys(self.layer_names, self._builder.build(0, common))
