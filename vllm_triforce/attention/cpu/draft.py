"""Attention of level 1's draft on the CPU, with metadata of vLLM's own builder."""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_triforce.attention.base import DraftAttention


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
