"""State of the requests in a proposal, on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.budget import CONTEXT_SHARE
from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.row_table import OutcomeColumn, RowColumn, SlotColumn, StateColumn

_SHARE = tl.constexpr(CONTEXT_SHARE)


class SamplingParameters(NamedTuple):
    """vLLM's sampling parameters, each [max_num_reqs], by state
    (vllm/v1/worker/gpu/sample/states.py)."""

    temperature: torch.Tensor  # float32; 0 is greedy
    seeds: torch.Tensor  # int64
    top_k: torch.Tensor  # int32; the vocabulary's size for none
    top_p: torch.Tensor  # float32; 1 for none
    min_p: torch.Tensor  # float32; 0 for none


class Rows:
    """Buffers of the requests in a proposal, at addresses that CUDA graphs can rely on.

    Args:
        max_rows: requests that can be speculated on at a time, and slots.
        vocab_size: of the target; a request without top-k has this one.
    """

    def __init__(
        self, config: ResolvedConfig, max_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.num_speculative_tokens = length = config.num_speculative_tokens
        self.gamma = config.gamma
        self.vocab_size = vocab_size
        self.num_rows = 0
        table = torch.zeros(max_rows, col.ROW_LENGTH, dtype=torch.int32, device=device)
        self.table = table
        self.row_metadata = table[:, : len(RowColumn)]
        """[max_rows, len(RowColumn)], the host's columns."""
        self.count = table[:1, StateColumn.NUM_ROWS]
        """``num_rows`` for kernels, which may be in a CUDA graph for more rows."""
        self.seeds = table.view(torch.int64)[:, StateColumn.SEED // 2]
        self.temperature = table.view(torch.float32)[:, StateColumn.TEMPERATURE]
        self.computed = table[:, StateColumn.COMPUTED]
        self.last_token = table[:, StateColumn.LAST_TOKEN]
        self.length = table[:, StateColumn.LENGTH]
        self.room = table[:, StateColumn.ROOM]
        self.tail = table[:, StateColumn.TAIL]
        self.num_selected = table[:, StateColumn.NUM_SELECTED]
        self.first_newly_full = table[:, StateColumn.FIRST_NEWLY_FULL]
        self.last_newly_full = table[:, StateColumn.LAST_NEWLY_FULL]
        self.num_drafted = table[:, StateColumn.NUM_DRAFTED]
        self.num_emitted = table[:, StateColumn.NUM_EMITTED]
        self.slot_disabled = table[:, SlotColumn.DISABLED]
        self.drafted = table[:, col.FIRST_DRAFT :][:, : self.gamma]
        self.proposal = table[:, col.FIRST_PROPOSED :][:, :length]
        # By parameter, as vLLM's kernels need them to be contiguous.
        self._masks = torch.zeros(4, max_rows, dtype=torch.int32, device=device)
        self.top_k = self._masks[0].fill_(vocab_size)
        self.divisor, self.top_p, self.min_p = self._masks[1:].view(torch.float32)
        """The divisor is the temperature, 1 where a row is greedy."""
        self.top_p.fill_(1.0)
        # Contiguous, so that the copy to the host is a single one.
        self.outcomes = torch.zeros(max_rows, len(OutcomeColumn), dtype=torch.int32, device=device)
        limits = [config.min_context, config.block_size, *astuple(config.budget)]
        limits += [config.table_width, vocab_size, length, config.has_head]
        self._limits = torch.tensor(limits, dtype=torch.int32, device=device)

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
        return self.table[: self.num_rows, column]

    def init(
        self,
        row_metadata: torch.Tensor,  # [num_rows, len(RowColumn)], int32
        num_computed: torch.Tensor,  # [max_num_reqs], int32, by state
        num_sampled: torch.Tensor,  # [batch size], int
        last_sampled: torch.Tensor,  # [max_num_reqs, 1], int64, by state
        parameters: SamplingParameters,
    ) -> None:
        """Read each row's lengths and sampling parameters, and find its room."""
        self.num_rows = len(row_metadata)
        self.row_metadata[: self.num_rows].copy_(row_metadata)
        _init_rows_kernel[(self.max_rows,)](
            self.table,
            self.num_rows,
            self._masks,
            self.outcomes,
            num_computed,
            num_sampled,
            last_sampled,
            *parameters,
            self._limits,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _init_rows_kernel(
    table_ptr,  # [max_rows, ROW_STRIDE], written after the host's columns
    num_rows,
    masks_ptr,  # [4, max_rows], written: top_k, and as float32 divisor, top_p, min_p
    outcomes_ptr,  # [max_rows, NUM_OUTCOMES], written
    num_computed_ptr,  # [max_num_reqs], by state
    num_sampled_ptr,  # [batch size]
    last_sampled_ptr,  # [max_num_reqs, 1], by state
    state_temperature_ptr,  # [max_num_reqs], by state, and so are the four below
    state_seeds_ptr,
    state_top_k_ptr,
    state_top_p_ptr,
    state_min_p_ptr,
    limits_ptr,  # [9], which are the same for all rows, in the order that they are read in
):
    # Level 2's blocks of a request with 1,000 tokens, blocks of 16, a budget of 32 of which 8 are
    # recent:
    #     block   0 ... 53                        54 ... 61   62
    #             before the tail: it reads 24,   the tail: recent, and the one being written
    #             and skips 30 (480 tokens)
    row, max_rows = tl.program_id(0), tl.num_programs(0)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    is_used = row < num_rows
    min_context = tl.load(limits_ptr)
    block_size = tl.load(limits_ptr + 1)
    min_budget = tl.load(limits_ptr + 2)
    max_budget = tl.load(limits_ptr + 3)
    recent_blocks = tl.load(limits_ptr + 4)
    width = tl.load(limits_ptr + 5)
    vocab_size = tl.load(limits_ptr + 6)
    num_speculative_tokens = tl.load(limits_ptr + 7)
    has_head = tl.load(limits_ptr + 8)  # its window has no sinks
    tl.store(table_ptr + col.NUM_ROWS, num_rows, mask=row == 0)
    # Padding is greedy and masks nothing.
    state = tl.load(row_ptr + col.STATE)
    temperature = tl.load(state_temperature_ptr + state, mask=is_used, other=0.0)
    store_float(row_ptr + col.TEMPERATURE, temperature)
    top_k = tl.load(state_top_k_ptr + state, mask=is_used, other=vocab_size)
    masks_ptr += row
    tl.store(masks_ptr, top_k)
    store_float(masks_ptr + max_rows, tl.where(temperature > 0, temperature, 1.0))
    top_p = tl.load(state_top_p_ptr + state, mask=is_used, other=1.0)
    store_float(masks_ptr + 2 * max_rows, top_p)
    min_p = tl.load(state_min_p_ptr + state, mask=is_used, other=0.0)
    store_float(masks_ptr + 3 * max_rows, min_p)
    for column in tl.static_range(col.NUM_OUTCOMES):
        tl.store(outcomes_ptr + row * col.NUM_OUTCOMES + column, 0)
    if not is_used:
        columns = tl.arange(0, col.DRAFTED)
        mask = (columns >= col.COMPUTED) & (columns < col.NUM_ROWS)
        tl.store(row_ptr + columns, 0, mask=mask)
        return
    slot_ptr = table_ptr + tl.load(row_ptr + col.SLOT) * col.ROW_STRIDE
    owner = tl.load(row_ptr + col.OWNER)
    reserved = tl.load(row_ptr + col.RESERVED)
    computed = tl.load(num_computed_ptr + state).to(tl.int32)
    seed_ptr = (row_ptr + col.SEED).to(tl.pointer_type(tl.int64))
    tl.store(seed_ptr, tl.load(state_seeds_ptr + state))
    num_full = computed // block_size
    is_sparse = owner != col.UNUSED
    tail = tl.where(is_sparse, tl.maximum(num_full - recent_blocks, 0), num_full)
    first = tl.load(slot_ptr + col.SUMMARIZED, mask=owner == col.SAME_OWNER, other=0)
    tl.store(slot_ptr + col.SUMMARIZED, num_full, mask=is_sparse)
    # RetrievalBudget.of()
    budget = tl.minimum(tl.maximum(num_full // _SHARE, min_budget), max_budget)
    selected = tl.minimum(tail, tl.maximum(budget - recent_blocks, 0))
    rounds = tl.load(row_ptr + col.MAX_ROUNDS)
    room = tl.minimum(tl.load(row_ptr + col.MAX_TOKENS), reserved - computed)
    # The scheduler keeps inputs below max_model_len - 1 (v1/core/sched/scheduler.py), and the
    # full pass adds a token.
    room = tl.minimum(room, tl.load(row_ptr + col.LIMIT) - 2 - computed)
    # Blocks of the sparse table that the row needs until its proposal ends.
    reach = tl.cdiv(computed + num_speculative_tokens + 1, block_size) - tail + selected
    is_ready = tl.load(num_sampled_ptr + tl.load(row_ptr + col.BATCH_ROW)) > 0
    is_ready = is_ready & (computed >= min_context)
    # The first pass of level 1 reads one token more, which must be in its window.
    before_window = has_head * tl.load(row_ptr + col.WINDOW_START)
    is_ready = is_ready & (computed - before_window >= num_speculative_tokens)
    is_ready = is_ready & ((reach <= width) | (owner == col.UNUSED))
    is_ready = is_ready & (tl.load(slot_ptr + col.DISABLED) == 0)
    room = tl.where(is_ready & (rounds > 0), tl.maximum(room, 0), 0)
    tl.store(row_ptr + col.COMPUTED, computed)
    tl.store(row_ptr + col.LAST_TOKEN, tl.load(last_sampled_ptr + state).to(tl.int32))
    tl.store(row_ptr + col.LENGTH, 0)
    tl.store(row_ptr + col.ROOM, room)
    tl.store(row_ptr + col.ROUNDS_LEFT, rounds)
    tl.store(row_ptr + col.TAIL, tail)
    tl.store(row_ptr + col.NUM_SELECTED, selected)
    # The group with the fewest tokens may have smaller blocks.
    tl.store(row_ptr + col.NUM_BLOCKS, tl.cdiv(reserved, block_size))
    tl.store(row_ptr + col.FIRST_NEWLY_FULL, first)
    tl.store(row_ptr + col.LAST_NEWLY_FULL, tl.where(is_sparse, num_full, 0))
    tl.store(row_ptr + col.HAS_NAN, 0)


@triton.jit
def load_float(pointer):
    """Load a float32 from a table of int32."""
    return tl.load(pointer.to(tl.pointer_type(tl.float32)))


@triton.jit
def store_float(pointer, value):
    """Store a float32 to a table of int32."""
    tl.store(pointer.to(tl.pointer_type(tl.float32)), value)


@triton.jit
def load_seed(row_ptr):
    """Load a row's seed, int64."""
    return tl.load((row_ptr + col.SEED).to(tl.pointer_type(tl.int64)))


@triton.jit
def disable_slot(table_ptr, row_ptr):
    """Mark a row's request: it is not speculated on any more."""
    tl.store(table_ptr + tl.load(row_ptr + col.SLOT) * col.ROW_STRIDE + col.DISABLED, 1)
