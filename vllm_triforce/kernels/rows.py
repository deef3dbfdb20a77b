"""State of the requests in a proposal, on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.distributions import SamplingParameters
from vllm_triforce.kernels.row_table import (
    BATCH_ROW,
    COMPUTED,
    DISABLED,
    DIVISOR,
    FIRST_NEWLY_FULL,
    HAS_NAN,
    KEPT_FULL,
    KEPT_TAIL,
    LAST_NEWLY_FULL,
    LAST_TOKEN,
    LENGTH,
    LIMIT,
    MAX_ROUNDS,
    MAX_TOKENS,
    MIN_P,
    NEW_OWNER,
    NOT_DUE,
    NUM_BLOCKS,
    NUM_OUTCOMES,
    NUM_ROW_COLUMNS,
    NUM_ROWS,
    NUM_SELECTED,
    NUM_SLOT_COLUMNS,
    REFRESH,
    RESERVED,
    ROOM,
    ROUNDS_LEFT,
    SKIPPED,
    SLOT,
    STATE,
    TAIL,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNUSED,
    FloatColumn,
    OutcomeColumn,
    RowColumn,
    SlotColumn,
    StateColumn,
    row_value,
    set_row_value,
)


@dataclass(frozen=True)
class RowLimits:
    """Configuration that bounds the proposal of every row."""

    min_context: int  # tokens
    block_size: int  # tokens
    recent_blocks: int
    max_selected: int  # blocks
    width: int  # blocks, of the sparse block tables


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
        self.num_rows = 0
        self.table = table = integers(NUM_ROW_COLUMNS, max_rows)
        self.row_metadata = table[: len(RowColumn)].T
        """[max_rows, len(RowColumn)], the host's columns."""
        self.count = table[StateColumn.NUM_ROWS, :1]
        """``num_rows`` for kernels, which may be in a CUDA graph for more rows."""
        self.computed = table[StateColumn.COMPUTED]
        self.last_token = table[StateColumn.LAST_TOKEN]
        self.length = table[StateColumn.LENGTH]
        self.room = table[StateColumn.ROOM]
        self.rounds_left = table[StateColumn.ROUNDS_LEFT]
        self.tail = table[StateColumn.TAIL]
        self.num_selected = table[StateColumn.NUM_SELECTED]
        self.skipped = table[StateColumn.SKIPPED]
        self.num_blocks = table[StateColumn.NUM_BLOCKS]
        self.first_newly_full = table[StateColumn.FIRST_NEWLY_FULL]
        self.last_newly_full = table[StateColumn.LAST_NEWLY_FULL]
        self.num_drafted = table[StateColumn.NUM_DRAFTED]
        self.num_accepted = table[StateColumn.NUM_ACCEPTED]
        self.num_emitted = table[StateColumn.NUM_EMITTED]
        self.has_nan = table[StateColumn.HAS_NAN]
        self.top_k = table[StateColumn.TOP_K].fill_(vocab_size)
        self.floats = integers(len(FloatColumn), max_rows, dtype=torch.float32)
        self.temperature = self.floats[FloatColumn.TEMPERATURE]
        self.divisor = self.floats[FloatColumn.DIVISOR]
        self.top_p = self.floats[FloatColumn.TOP_P].fill_(1.0)
        self.min_p = self.floats[FloatColumn.MIN_P]
        self.seeds = integers(max_rows, dtype=torch.int64)
        self.slots = integers(num_slots, len(SlotColumn))
        self.slot_disabled = self.slots[:, SlotColumn.DISABLED]
        self.outcomes = integers(max_rows, len(OutcomeColumn))
        self.drafted = integers(max_rows, gamma)
        self.proposal = integers(max_rows, num_speculative_tokens, dtype=torch.int64)

    @contextmanager
    def with_num_rows(self, num_rows: int) -> Iterator[None]:
        """Set ``num_rows`` while work is captured for this many rows."""
        before, self.num_rows = self.num_rows, num_rows
        try:
            yield
        finally:
            self.num_rows = before

    def column(self, column: RowColumn) -> torch.Tensor:  # [num_rows], int32
        """Return a column of the rows in use, as a view."""
        return self.table[column, : self.num_rows]

    def init(
        self,
        row_metadata: torch.Tensor,  # [num_rows, len(RowColumn)], int32
        num_computed: torch.Tensor,  # [max_num_reqs], int32, by state
        num_sampled: torch.Tensor,  # [batch size], int
        last_sampled: torch.Tensor,  # [max_num_reqs, 1], int64, by state
        parameters: SamplingParameters,
        limits: RowLimits,
    ) -> None:
        """Read each row's lengths and sampling parameters, and find its room."""
        self.num_rows = len(row_metadata)
        self.row_metadata[: self.num_rows].copy_(row_metadata)
        _init_rows_kernel[(self.max_rows,)](
            self.table,
            self.max_rows,
            self.num_rows,
            self.floats,
            self.seeds,
            self.slots,
            self.outcomes,
            num_computed,
            num_sampled,
            last_sampled,
            parameters.temperature,
            parameters.seeds,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            self.vocab_size,
            self.num_speculative_tokens,
            limits.min_context,
            limits.block_size,
            limits.recent_blocks,
            limits.max_selected,
            limits.width,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _init_rows_kernel(
    table_ptr,  # [NUM_ROW_COLUMNS, max_rows], written after the host's columns
    max_rows,
    num_rows,
    floats_ptr,  # [NUM_FLOAT_COLUMNS, max_rows], written
    seeds_ptr,  # [max_rows], written
    slots_ptr,  # [num_slots, NUM_SLOT_COLUMNS], updated
    outcomes_ptr,  # [max_rows, NUM_OUTCOMES], written
    num_computed_ptr,  # [max_num_reqs], by state
    num_sampled_ptr,  # [batch size]
    last_sampled_ptr,  # [max_num_reqs, 1], by state
    state_temperature_ptr,  # [max_num_reqs], by state, and so are the four below
    state_seeds_ptr,
    state_top_k_ptr,
    state_top_p_ptr,
    state_min_p_ptr,
    vocab_size,
    num_speculative_tokens,
    min_context,
    block_size,
    recent_blocks,
    max_selected,
    width,
):
    row = tl.program_id(0)
    computed = 0
    room = 0
    rounds = 0
    tail = 0
    selected = 0
    num_blocks = 0
    first = 0
    last = 0
    token = 0
    temperature = 0.0
    top_k = vocab_size
    top_p = 1.0
    min_p = 0.0
    tl.store(table_ptr + NUM_ROWS * max_rows, num_rows, mask=row == 0)
    if row < num_rows:
        state = row_value(table_ptr, max_rows, row, STATE)
        slot = slots_ptr + row_value(table_ptr, max_rows, row, SLOT) * NUM_SLOT_COLUMNS
        refresh = row_value(table_ptr, max_rows, row, REFRESH)
        reserved = row_value(table_ptr, max_rows, row, RESERVED)
        limit = row_value(table_ptr, max_rows, row, LIMIT)
        computed = tl.load(num_computed_ptr + state).to(tl.int32)
        token = tl.load(last_sampled_ptr + state).to(tl.int32)
        temperature = tl.load(state_temperature_ptr + state)
        top_k = tl.load(state_top_k_ptr + state)
        top_p = tl.load(state_top_p_ptr + state)
        min_p = tl.load(state_min_p_ptr + state)
        tl.store(seeds_ptr + row, tl.load(state_seeds_ptr + state))
        num_full = computed // block_size
        num_blocks = reserved // block_size
        if refresh == UNUSED:
            tail = num_full
        elif refresh != NOT_DUE:
            tail = tl.maximum(num_full - recent_blocks, 0)
            first = tl.where(refresh == NEW_OWNER, 0, tl.load(slot + KEPT_FULL))
            last = num_full
            tl.store(slot + KEPT_TAIL, tail)
            tl.store(slot + KEPT_FULL, num_full)
        else:
            tail = tl.load(slot + KEPT_TAIL)
        selected = tl.minimum(tail, max_selected)
        rounds = row_value(table_ptr, max_rows, row, MAX_ROUNDS)
        max_tokens = row_value(table_ptr, max_rows, row, MAX_TOKENS)
        room = tl.minimum(max_tokens, reserved - computed)
        # The scheduler keeps inputs below max_model_len - 1 (v1/core/sched/scheduler.py), and the
        # full pass adds a token.
        room = tl.minimum(room, limit - 2 - computed)
        # Blocks of the sparse table that the row needs until its proposal ends.
        reach = tl.cdiv(computed + num_speculative_tokens + 1, block_size) - tail + selected
        batch_row = row_value(table_ptr, max_rows, row, BATCH_ROW)
        is_ready = tl.load(num_sampled_ptr + batch_row) > 0
        is_ready = is_ready & (computed >= min_context)
        is_ready = is_ready & (computed >= num_speculative_tokens)
        is_ready = is_ready & ((reach <= width) | (refresh == UNUSED))
        is_ready = is_ready & (tl.load(slot + DISABLED) == 0)
        room = tl.where(is_ready & (rounds > 0), tl.maximum(room, 0), 0)
    set_row_value(table_ptr, max_rows, row, COMPUTED, computed)
    set_row_value(table_ptr, max_rows, row, LAST_TOKEN, token)
    set_row_value(table_ptr, max_rows, row, LENGTH, 0)
    set_row_value(table_ptr, max_rows, row, ROOM, room)
    set_row_value(table_ptr, max_rows, row, ROUNDS_LEFT, rounds)
    set_row_value(table_ptr, max_rows, row, TAIL, tail)
    set_row_value(table_ptr, max_rows, row, NUM_SELECTED, selected)
    set_row_value(table_ptr, max_rows, row, SKIPPED, (tail - selected) * block_size)
    set_row_value(table_ptr, max_rows, row, NUM_BLOCKS, num_blocks)
    set_row_value(table_ptr, max_rows, row, FIRST_NEWLY_FULL, first)
    set_row_value(table_ptr, max_rows, row, LAST_NEWLY_FULL, last)
    set_row_value(table_ptr, max_rows, row, HAS_NAN, 0)
    # Padding is greedy and masks nothing.
    set_row_value(table_ptr, max_rows, row, TOP_K, top_k)
    set_row_value(floats_ptr, max_rows, row, TEMPERATURE, temperature)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    set_row_value(floats_ptr, max_rows, row, DIVISOR, divisor)
    set_row_value(floats_ptr, max_rows, row, TOP_P, top_p)
    set_row_value(floats_ptr, max_rows, row, MIN_P, min_p)
    for column in tl.static_range(NUM_OUTCOMES):
        tl.store(outcomes_ptr + row * NUM_OUTCOMES + column, 0)
