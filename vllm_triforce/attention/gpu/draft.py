"""Attention of level 1's draft on a GPU: all heads of a request are one sequence."""

import torch

from vllm_triforce.attention.base import DraftAttention
from vllm_triforce.attention.gpu.impl import attach
from vllm_triforce.attention.gpu.paged_kernels import PagedSequences, uniform_starts


class GPUDraftAttention(DraftAttention):
    """Attention over vLLM's paged kernels, called without a backend's metadata."""

    def __init__(self, layers: dict, builder) -> None:
        super().__init__(layers, builder)
        for layer_name, layer in layers.items():
            impl = layer.impl
            if impl.alibi_slopes is not None or impl.sinks is not None:
                raise ValueError(
                    f"draft layer {layer_name!r} has ALiBi or attention sinks, which level 1's "
                    "window does not fit; use another draft"
                )
            attach(layer, 0)

    def uniform(
        self,
        num_rows: int,
        query_len: int,
        seq_lens: torch.Tensor,  # [num_rows], int32
        block_table: torch.Tensor,  # [num_rows, blocks per window], int32
        max_seq_len: int,
    ) -> dict[str, PagedSequences]:
        starts = uniform_starts(num_rows, query_len, seq_lens.device)
        sequences = PagedSequences(starts, seq_lens, block_table, query_len, max_seq_len)
        return dict.fromkeys(self.layer_names, sequences)

    def ragged(
        self,
        query_start_loc: torch.Tensor,  # [num_reqs + 1], int32
        seq_lens: torch.Tensor,  # [num_reqs], int32
        block_table: torch.Tensor,  # [num_reqs, blocks per window], int32
        max_seq_len: int,
    ) -> dict[str, PagedSequences]:
        max_query_len = max_seq_len  # each request feeds its whole window
        sequences = PagedSequences(
            query_start_loc, seq_lens, block_table, max_query_len, max_seq_len
        )
        return dict.fromkeys(self.layer_names, sequences)
