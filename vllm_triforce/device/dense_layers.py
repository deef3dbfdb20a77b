"""Level 2's passes in layers that retrieval does not fit, as those with a sliding window."""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_triforce.core.kv_groups import KVGroup
from vllm_triforce.kernels.feeding import PassInputs


class DenseLayers:
    """Those of one KV cache group: they read what they would read in a full pass.

    All that they are given lies in buffers that stay where they are.

    Args:
        inputs: of level 2's pass.
        seq_lens: [max_rows], int32, tokens of each row once the pass is over.
        table: [max_rows, width], int32, the rows' block tables in this group.
        max_seq_len: that the target knows.
    """

    def __init__(
        self,
        group: KVGroup,
        inputs: PassInputs,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        max_seq_len: int,
    ) -> None:
        self.names = group.dense_layer_names
        self._builder: Any = group.dense_builder
        self._block_size = group.block_size
        self._inputs = inputs
        self._seq_lens = seq_lens
        self._table = table
        self._max_seq_len = max_seq_len
        self._starts_on_host = torch.arange(len(seq_lens) + 1, dtype=torch.int32) * inputs.query_len
        self._starts = self._starts_on_host.to(seq_lens.device)
        owners = torch.arange(len(seq_lens), device=seq_lens.device)
        self._owners = owners.repeat_interleave(inputs.query_len)
        self._slot_mapping = torch.empty_like(inputs.slot_mapping)

    def slots(self, num_rows: int) -> torch.Tensor:  # [num_rows * query_len], int64
        """Where this group's blocks have the places of ``inputs.slot_mapping``: -1 for none."""
        num_tokens = num_rows * self._inputs.query_len
        positions = self._inputs.positions[:num_tokens]
        size = self._block_size
        blocks = self._table[self._owners[:num_tokens], positions // size].to(torch.int64)
        places = blocks * size + positions % size
        own = self._inputs.slot_mapping[:num_tokens]
        return torch.where(own < 0, own, places, out=self._slot_mapping[:num_tokens])

    def metadata(self, num_rows: int) -> Any:
        """The backend's own. What the builder makes of it on the device belongs to the pass."""
        length = self._inputs.query_len
        num_tokens = num_rows * length
        common = CommonAttentionMetadata(
            query_start_loc=self._starts[: num_rows + 1],
            query_start_loc_cpu=self._starts_on_host[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            num_reqs=num_rows,
            num_actual_tokens=num_tokens,
            max_query_len=length,
            max_seq_len=self._max_seq_len,
            block_table_tensor=self._table[:num_rows],
            slot_mapping=self._slot_mapping[:num_tokens],
            causal=True,
            positions=self._inputs.positions[:num_tokens],
        )
        return self._builder.build(0, common)
