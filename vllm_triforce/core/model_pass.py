"""Forward pass of a vLLM model outside the scheduler's step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_triforce.vllm_patches.kv_connector import hidden_kv_connector


@dataclass
class PassInput:
    """Inputs of a ragged batch, its rows concatenated."""

    token_ids: torch.Tensor  # [num_tokens], int32
    positions: torch.Tensor  # [num_tokens], int64
    query_lens: torch.Tensor  # [num_rows], int32
    query_start_loc: torch.Tensor  # [num_rows + 1], int32
    seq_lens: torch.Tensor  # [num_rows], int32, cached tokens and tokens of this pass
    spans: list[tuple[int, int]]
    """Each row's positions, as ``(first, last + 1)``."""

    @classmethod
    def from_rows(
        cls, rows: list[list[int]], first_positions: list[int], device: torch.device
    ) -> "PassInput":
        """Build the inputs of a pass.

        Args:
            rows: token ids of each row.
            first_positions: position of each row's first token.
        """
        # Lists: on a CPU a tensor operation costs more than a loop over a few numbers.
        spans = [(first, first + len(row)) for row, first in zip(rows, first_positions)]

        def tensor(values, dtype):
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            tensor(chain.from_iterable(rows), torch.int32),
            tensor(chain.from_iterable(range(*span) for span in spans), torch.int64),
            tensor(map(len, rows), torch.int32),
            tensor(accumulate(map(len, rows), initial=0), torch.int32),
            tensor((end for _, end in spans), torch.int32),
            spans,
        )

    def slot_mapping(
        self,
        block_ids: Sequence[np.ndarray],  # block ids of each row
        block_size: int,
    ) -> torch.Tensor:  # [num_tokens], int64
        """Compute the KV cache slot of each token."""
        slots = [
            int(blocks[position // block_size]) * block_size + position % block_size
            for blocks, span in zip(block_ids, self.spans)
            for position in range(*span)
        ]
        return torch.tensor(slots, dtype=torch.int64, device=self.positions.device)

    def common_metadata(
        self, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Build the common metadata for vLLM's metadata builders."""
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=self.query_start_loc.cpu(),
            seq_lens=self.seq_lens,
            num_reqs=len(self.query_lens),
            num_actual_tokens=len(self.token_ids),
            max_query_len=int(self.query_lens.max()),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
            causal=True,
            positions=self.positions,
        )


def run_model(
    model: torch.nn.Module,
    vllm_config,
    inputs: PassInput,
    attn_metadata: dict | None,
    slot_mapping: dict[str, torch.Tensor],
    **more: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """Run a model's forward pass.

    Args:
        more: further inputs of the model.

    Returns:
        Hidden states, [num_tokens, hidden_size], and the model's other outputs: the
        states of a target's auxiliary layers, those that an EAGLE-3 head feeds back, or None.
    """
    context = set_forward_context(
        attn_metadata, vllm_config, num_tokens=len(inputs.token_ids), slot_mapping=slot_mapping
    )
    with hidden_kv_connector(), context:
        output = model(input_ids=inputs.token_ids, positions=inputs.positions, **more)
    return output if isinstance(output, tuple) else (output, None)
