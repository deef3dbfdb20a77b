"""The requests of one proposal, as buffers on the device, and what fills them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.triton_utils import triton

from vllm_triforce.kernels.distributions import DrawParameters, SamplingParameters
from vllm_triforce.kernels.nan_guard import NanFlags
from vllm_triforce.kernels.pass_inputs import (
    PassInputs,
    prepare_draft_inputs_kernel,
    prepare_target_inputs_kernel,
    prepare_window_inputs_kernel,
)
from vllm_triforce.kernels.row_state import commit_rows_kernel, init_rows_kernel
from vllm_triforce.kernels.row_table import OutcomeColumn, RowColumn


class Rows:
    """Buffers of the requests in a proposal, at addresses that CUDA graphs can rely on.

    Args:
        max_rows: requests that can be speculated on at a time.
        gamma: tokens that level 1 drafts for a pass of level 2.
        vocab_size: of the target; a request without top-k has this one.
    """

    def __init__(
        self,
        max_rows: int,
        num_speculative_tokens: int,
        gamma: int,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        def integers(*shape: int, dtype=torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_rows = max_rows
        self.num_speculative_tokens = num_speculative_tokens
        self.gamma = gamma
        self.vocab_size = vocab_size
        self.row_metadata = integers(max_rows, len(RowColumn))
        self.num_rows = 0
        # The same for kernels, which may be in a CUDA graph for more rows.
        self.count = integers(1)
        # Kept from proposal to proposal, [num_slots]: the first block of the tail, and the blocks
        # that were full, when the selection was made.
        self.slot_tail = integers(num_slots)
        self.slot_known = integers(num_slots)
        self.faults = NanFlags(
            row=integers(max_rows),
            slot=integers(num_slots),
            row_metadata=self.row_metadata,
        )
        # All below by row. Tokens with KV, the newest token, the length that the proposal may
        # reach, the rounds that may still be taken for it, and the length that it has; each
        # [max_rows].
        self.computed, self.last_token, self.room, self.rounds_left, self.length = integers(
            5, max_rows
        )
        # Of level 2's cache: first block of the tail, selected blocks, tokens left out before the
        # tail, allocated blocks.
        self.tail, self.num_selected, self.skipped, self.num_blocks = integers(4, max_rows)
        # Blocks that became full since the last selection; the second is the end, exclusive.
        self.first_newly_full, self.last_newly_full = integers(2, max_rows)
        # Of the round: what level 1 drafted, what of it was accepted, what the proposal grew by.
        self.num_drafted, self.num_accepted, self.num_emitted = integers(3, max_rows)
        self.temperature = integers(max_rows, dtype=torch.float32)
        self.divisor = integers(max_rows, dtype=torch.float32)  # the same, 1 where a row is greedy
        self.seeds = integers(max_rows, dtype=torch.int64)
        # Which tokens are drawn of at all; what masks nothing where a row asks for nothing.
        self.top_k = torch.full_like(self.computed, vocab_size)
        self.top_p = torch.ones_like(self.divisor)
        self.min_p = torch.zeros_like(self.divisor)
        self.outcomes = integers(max_rows, len(OutcomeColumn))
        self.token_positions = integers(max_rows)  # index of the first drafted token
        self.drafted = integers(max_rows, gamma)
        self.proposal = integers(max_rows, num_speculative_tokens, dtype=torch.int64)

    @contextmanager
    def with_num_rows(self, num_rows: int) -> Iterator[None]:
        """While work is captured for so many rows."""
        before, self.num_rows = self.num_rows, num_rows
        try:
            yield
        finally:
            self.num_rows = before

    @property
    def drawing(self) -> DrawParameters:
        """How the rows' tokens are drawn."""
        its = (self.temperature, self.seeds, self.computed)
        return DrawParameters(*(values[: self.num_rows] for values in its))

    def column(self, column: RowColumn) -> torch.Tensor:  # [num_rows], int32
        """A column of the rows' table."""
        return self.row_metadata[: self.num_rows, column].contiguous()

    def begin(
        self,
        row_metadata: torch.Tensor,  # [num_rows, len(RowColumn)], int32
        num_computed: torch.Tensor,  # [max_num_reqs], int32, by state
        num_sampled: torch.Tensor,  # [batch size], int
        last_sampled: torch.Tensor,  # [max_num_reqs, 1], int64, by state
        parameters: SamplingParameters,
        min_context: int,
        block_size: int,
        recent_blocks: int,
        max_selected: int,
        width: int,  # of the sparse block tables
    ) -> None:
        """Reads each row's lengths and says how much it may propose."""
        self.num_rows = len(row_metadata)
        self.row_metadata[: self.num_rows].copy_(row_metadata)
        init_rows_kernel[(self.max_rows,)](
            self.row_metadata,
            self.num_rows,
            self.count,
            num_computed,
            num_sampled,
            last_sampled,
            parameters.temperature,
            parameters.seeds,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            self.slot_tail,
            self.slot_known,
            self.faults.slot,
            self.faults.row,
            self.computed,
            self.last_token,
            self.room,
            self.rounds_left,
            self.length,
            self.tail,
            self.num_selected,
            self.skipped,
            self.num_blocks,
            self.first_newly_full,
            self.last_newly_full,
            self.temperature,
            self.divisor,
            self.seeds,
            self.top_k,
            self.top_p,
            self.min_p,
            self.outcomes,
            self.vocab_size,
            self.num_speculative_tokens,
            min_context,
            self.num_speculative_tokens,
            block_size,
            recent_blocks,
            max_selected,
            width,
        )

    def feed_window(
        self,
        inputs: PassInputs,
        padded_rows: int,
        all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32
        num_sinks: int,
        capacity: int,
        block_size: int,
        blocks_per_slot: int,
    ) -> None:
        """The newest ``inputs.query_len`` tokens of each row, at their places in its window."""
        prepare_window_inputs_kernel[(padded_rows,)](
            self.row_metadata,
            self.count,
            all_token_ids,
            all_token_ids.stride(0),
            self.proposal,
            self.num_speculative_tokens,
            self.computed,
            self.length,
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.seq_lens,
            num_sinks,
            capacity,
            block_size,
            blocks_per_slot,
            inputs.query_len,
            PADDED_LEN=triton.next_power_of_2(inputs.query_len),
        )

    def feed_draft(
        self,
        inputs: PassInputs,
        padded_rows: int,
        step: int,
        capacity: int,
        block_size: int,
        blocks_per_slot: int,
    ) -> None:
        """Level 1's newest token of each row, behind what the pass before it fed."""
        prepare_draft_inputs_kernel[(padded_rows,)](
            self.row_metadata,
            self.count,
            self.drafted,
            self.gamma,
            step,
            inputs.seq_lens,
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            capacity,
            block_size,
            blocks_per_slot,
        )

    def feed_target(
        self,
        inputs: PassInputs,
        padded_rows: int,
        tables: torch.Tensor,  # [num_rows, table_width], int32
        dense_seq_lens: torch.Tensor,  # [max_rows], int32, written
        block_size: int,
        max_position: int,
        num_kv_heads: int,
        pool_mapping: torch.Tensor | None = None,
        pool_width: int = 0,
    ) -> None:
        """The newest token of each row and its drafts; ``inputs.seq_lens`` has one per KV head.

        Args:
            pool_mapping: [max_rows * (gamma + 1)], int64, written: where the tokens go in the pool
                of layers in host memory.
            pool_width: blocks that a slot has there.
        """
        prepare_target_inputs_kernel[(padded_rows,)](
            self.row_metadata,
            self.count,
            tables,
            tables.stride(0),
            self.proposal,
            self.num_speculative_tokens,
            self.drafted,
            self.num_drafted,
            self.computed,
            self.length,
            self.room,
            self.last_token,
            self.skipped,
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.seq_lens,
            dense_seq_lens,
            self.token_positions,
            inputs.slot_mapping if pool_mapping is None else pool_mapping,
            self.tail,
            self.num_selected,
            pool_width,
            block_size,
            max_position,
            num_kv_heads,
            self.gamma,
            HAS_POOL=pool_mapping is not None,
            PADDED_LEN=triton.next_power_of_2(self.gamma + 1),
            PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
        )

    def finish(
        self,
        draft_tokens: torch.Tensor,  # [batch size, num_speculative_tokens], int64, written
        handed_up,  # kernels/proposals.py, written
        counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
        is_direct: bool,
    ) -> None:
        """Hands the proposals to the batch, whose other places stay as they are.

        Args:
            is_direct: whether they are level 1's alone.
        """
        commit_rows_kernel[(self.num_rows,)](
            draft_tokens,
            self.row_metadata,
            self.proposal,
            self.length,
            handed_up.num_proposed,
            handed_up.slot_of_state,
            handed_up.state_of_slot,
            self.outcomes,
            counters,
            self.num_speculative_tokens,
            IS_DIRECT=is_direct,
            PADDED_LEN=triton.next_power_of_2(self.num_speculative_tokens),
        )
