"""Implementation of a retrieving layer on the CPU: a subclass of vLLM's own."""

from dataclasses import dataclass

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_triforce.attention.base import LayerOffload, LayerSelection, metadata_of
from vllm_triforce.attention.query_recorder import Recorder

# Element types that vLLM's CPU kernels store in a uint8 cache, by kv_cache_dtype.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


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
    """vLLM's implementation, which also records queries and takes sparse metadata."""

    layer_index: int
    recorder: Recorder
    offload: LayerOffload | None

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
        if not self.recorder.paused and isinstance(attn_metadata, CPUAttentionMetadata):
            self.recorder.record(self.layer_index, query, attn_metadata)
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
