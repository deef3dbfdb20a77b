"""Dense and sparse attention on vLLM's CPU backend (vllm/v1/attention/backends/cpu_attn.py)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_triforce.attention.cpu_impl import FP8, RetrievalCPUAttentionImpl, SparseCPUMetadata
from vllm_triforce.attention.query_recorder import QueryRecorder
from vllm_triforce.attention.sequence_rows import sequence_rows
from vllm_triforce.cache.chunk_summaries import summarise
from vllm_triforce.cache.key_layout import KeyLayout
from vllm_triforce.selection import Summary


class CPUDraftAttention:
    """Passes of the draft over its private cache, with metadata from vLLM's own builder."""

    def __init__(self, layers: dict, builder) -> None:
        self.layer_names = list(layers)
        self._builder = builder

    def uniform(self, num_rows, query_len, seq_lens, block_table, most: int) -> dict:
        starts = torch.arange(num_rows + 1, dtype=torch.int32) * query_len
        return self.ragged(starts, seq_lens, block_table, most)

    def ragged(self, query_start_loc, seq_lens, block_table, longest: int) -> dict:
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            num_reqs=len(seq_lens),
            num_actual_tokens=int(query_start_loc[-1]),
            max_query_len=int(query_start_loc.diff().max()),
            max_seq_len=longest,
            block_table_tensor=block_table,
            slot_mapping=query_start_loc,  # not read: the pass gives each layer its own
            causal=True,
        )
        return dict.fromkeys(self.layer_names, self._builder.build(0, common))


class CPURetrievalAttention:
    """What level 2 needs from the CPU backend, for layers of one geometry.

    Args:
        layers: vLLM's ``Attention`` layers that retrieve, in the order of the forward pass.
        builder: vLLM's metadata builder of these layers.
    """

    impl_cls = CPUAttentionBackendImpl

    def __init__(self, layers: list, builder, recorder: QueryRecorder) -> None:
        self._layers = layers
        self._builder = builder
        first = layers[0]
        self.num_kv_heads = first.num_kv_heads
        self._group = first.num_heads // first.num_kv_heads
        for index, layer in enumerate(layers):
            RetrievalCPUAttentionImpl.attach(layer, index, recorder)
        self.query_shape = (len(layers), first.num_heads, first.head_size)
        self._has_sinks = first.impl.sinks is not None
        self._layout: KeyLayout | None = None

    @staticmethod
    def can_retrieve(layer) -> bool:
        """Whether a layer's attention is plain enough to be split into one-head sequences."""
        impl = layer.impl
        return (
            isinstance(impl, CPUAttentionBackendImpl)
            and impl.sliding_window == -1
            and impl.alibi_slopes is None
            and impl.kv_sharing_target_layer_name is None
        )

    def head_strides(self) -> tuple[int, int]:
        """The CPU's blocks are head-major (``cache/one_head_blocks.py``)."""
        return self.num_kv_heads, 1

    def build(
        self,
        query_lens: torch.Tensor,  # [num_reqs], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32, in the shortened tables
        block_tables: torch.Tensor,  # [num_layers, num_reqs * num_kv_heads, width], int32
    ) -> list[SparseCPUMetadata]:
        """Metadata of one level 2 pass, a layer each; only the block tables differ."""
        heads = self.num_kv_heads
        split = self._metadata(
            query_lens.repeat_interleave(heads),
            seq_lens.repeat_interleave(heads),
            sequence_rows(query_lens, heads),
        )
        if not self._has_sinks:
            return [replace(split, block_table=table) for table in block_tables]
        one_head = self._metadata(query_lens, seq_lens, None)
        return [
            replace(split, one_head=replace(one_head, block_table=table)) for table in block_tables
        ]

    def _metadata(self, query_lens, seq_lens, rows) -> SparseCPUMetadata:
        """Of sequences of one KV head; the block table is still to come."""
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
        return SparseCPUMetadata(query_start_loc, seq_lens, None, scheduler_metadata, rows)

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows * num_kv_heads], int32, in the shortened tables
        block_tables: torch.Tensor,  # [num_layers, num_rows * num_kv_heads, width], int32
    ) -> list[SparseCPUMetadata]:
        """Metadata of a level 2 pass of ``query_len`` tokens a row."""
        query_lens = torch.full((num_rows,), query_len, dtype=torch.int32)
        return self.build(query_lens, seq_lens[:: self.num_kv_heads].contiguous(), block_tables)

    def update_summaries(
        self,
        summaries: Mapping[Summary, torch.Tensor],  # [num_layers, num_kv_heads, num_blocks, dim]
        tables: torch.Tensor,  # [num_reqs, width], int32, block tables
        first: torch.Tensor,  # [num_reqs], int32, logical block to begin with
        last: torch.Tensor,  # [num_reqs], int32, logical block to stop before
        max_blocks: int,
    ) -> None:
        """Summarises blocks that became full."""
        ranges = zip(tables, first.tolist(), last.tolist())
        block_ids = torch.cat([table[a:b] for table, a, b in ranges]).to(torch.int64)
        summarise(summaries, self.block_summaries(), block_ids)

    def block_summaries(self) -> list[Callable[[torch.Tensor, Summary], torch.Tensor]]:
        """For each layer, a function from block ids [n] and a kind to
        [n, num_kv_heads, head_dim]."""
        return [partial(self._summary_of, layer) for layer in self._layers]

    def _summary_of(self, layer, block_ids: torch.Tensor, kind: Summary) -> torch.Tensor:
        kv_cache = layer.kv_cache
        num_blocks, num_kv_heads, block_size, width = kv_cache.shape
        if self._layout is None:
            self._layout = self.probe_layout(layer)
        flat = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * width // 2)
        keys = flat[block_ids, :, 0]
        fp8 = FP8.get(layer.impl.kv_cache_dtype)
        if fp8 is None:
            return self._layout.summary(keys, kind)
        return self._layout.summary(keys.view(fp8).float(), kind) * layer._k_scale_float

    def probe_layout(self, layer) -> KeyLayout:
        """Lets the kernel write one block of known keys into a scratch cache."""
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
