"""One forward pass of a vLLM model outside the scheduler's own step."""

from dataclasses import dataclass

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class PassInput:
    """A ragged batch, flattened row after row."""

    token_ids: torch.Tensor  # [num_tokens], int32
    positions: torch.Tensor  # [num_tokens], int64
    query_lens: torch.Tensor  # [num_rows], int32
    query_start_loc: torch.Tensor  # [num_rows + 1], int32
    seq_lens: torch.Tensor  # [num_rows], int32, cached tokens and the ones of this pass

    @classmethod
    def from_rows(
        cls, rows: list[list[int]], first_positions: list[int], device: torch.device
    ) -> "PassInput":
        """Args:
        rows: token ids of each row.
        first_positions: position of each row's first token.
        """
        lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
        torch.cumsum(lens, 0, out=starts[1:])
        token_ids = [token for row in rows for token in row]
        positions = [p for row, p0 in zip(rows, first_positions) for p in range(p0, p0 + len(row))]
        return cls(
            torch.tensor(token_ids, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            lens.to(device),
            starts.to(device),
            (torch.tensor(first_positions, dtype=torch.int32) + lens).to(device),
        )

    def slot_mapping(
        self,
        block_table: torch.Tensor,  # [num_rows, width], int32
        block_size: int,
    ) -> torch.Tensor:  # [num_tokens], int64
        """Where each token's KV goes."""
        owners = torch.arange(len(self.query_lens), device=block_table.device)
        owners = owners.repeat_interleave(self.query_lens)
        blocks = block_table[owners, self.positions // block_size].to(torch.int64)
        return blocks * block_size + self.positions % block_size

    def common_metadata(
        self, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        """What vLLM's metadata builders start from."""
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
    attn_metadata: dict,
    slot_mapping: dict[str, torch.Tensor],
) -> torch.Tensor:  # [num_tokens, hidden_size]
    with set_forward_context(
        attn_metadata,
        vllm_config,
        num_tokens=len(inputs.token_ids),
        slot_mapping=slot_mapping,
    ):
        return model(input_ids=inputs.token_ids, positions=inputs.positions)
