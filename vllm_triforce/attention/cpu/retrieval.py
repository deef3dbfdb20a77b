"""Level 2's attention on the CPU: one call of vLLM's kernel per layer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_triforce.attention.base import LayerSelection, RaggedRetrievalAttention, replace_impl
from vllm_triforce.attention.cpu.impl import FP8, RetrievalCPUAttentionImpl, SparseCPUMetadata
from vllm_triforce.attention.query_recorder import Recorder
from vllm_triforce.cache.key_layout import KeyLayout
from vllm_triforce.cache.summaries import BlockSummaries
from vllm_triforce.selection import Summary


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
    heads = np.arange(num_kv_heads)
    rows, start = [], 0
    for n in lens:
        tokens = np.arange(start, start + n)
        rows.append((tokens[None, :] * num_kv_heads + heads[:, None]).ravel())
        start += n
    return torch.from_numpy(np.concatenate(rows))


class CPURetrievalAttention(RaggedRetrievalAttention):
    """Attention over vLLM's CPU kernel, on both runners."""

    def __init__(self, layers: list, builder, recorder: Recorder, offloads=None) -> None:
        super().__init__(layers, builder, recorder, offloads)
        first = layers[0]
        self._group = first.num_heads // first.num_kv_heads
        self._has_sinks = first.impl.sinks is not None
        self._layout: KeyLayout | None = None

    @staticmethod
    def can_retrieve(layer) -> bool:
        impl = layer.impl
        return (
            isinstance(impl, CPUAttentionBackendImpl)
            and impl.sliding_window == -1
            and impl.alibi_slopes is None
            and impl.kv_sharing_target_layer_name is None
        )

    def attach(self, layer, index: int, recorder: Recorder, offload=None) -> None:
        replace_impl(
            layer, RetrievalCPUAttentionImpl, layer_index=index, recorder=recorder, offload=offload
        )

    def head_strides(self) -> tuple[int, int]:
        """Return the strides of head-major blocks (``cache/one_head_blocks.py``)."""
        return self.num_kv_heads, 1

    def build(
        self,
        query_lens: torch.Tensor,  # [num_reqs], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32, in the shortened tables
        block_tables: Sequence[torch.Tensor],  # each [num_reqs * num_kv_heads, width], int32
        selection: LayerSelection | None = None,
    ) -> list[SparseCPUMetadata]:
        """Build the metadata once; layers differ in their block tables alone."""
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

    def block_summaries(self) -> BlockSummaries:
        return [partial(self._summary_of, layer) for layer in self.layers]

    def _summary_of(
        self,
        layer,
        block_ids: torch.Tensor,  # [n], int64
        kind: Summary,
    ) -> torch.Tensor:  # [n, num_kv_heads, head_dim]
        kv_cache = layer.kv_cache
        num_blocks, num_kv_heads, block_size, width = kv_cache.shape
        if self._layout is None:
            self._layout = self._probe_layout(layer)
        flat = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * width // 2)
        keys = flat[block_ids, :, 0]
        fp8 = FP8.get(layer.impl.kv_cache_dtype)
        if fp8 is None:
            return self._layout.summarize(keys, kind)
        return self._layout.summarize(keys.view(fp8).float(), kind) * layer._k_scale_float

    def _probe_layout(self, layer) -> KeyLayout:
        """Find the key layout: the kernel writes a block of given keys into a scratch cache."""
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
        return KeyLayout.probe(write_block, block_size, head_dim, key_dtype, fp8 is not None)
