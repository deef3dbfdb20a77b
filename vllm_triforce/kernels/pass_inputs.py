"""Inputs of the models' passes, made on the device from tokens that the host does not know.

Here and in the other kernels, a number that differs from step to step is not specialized on. Triton
would compile anew, while requests wait, for 1, for multiples of 16 and for others.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.row_table import (
    COMPUTED,
    LAST_TOKEN,
    LENGTH,
    NUM_DRAFTED,
    NUM_SELECTED,
    ROOM,
    SKIPPED,
    SLOT,
    STATE,
    TAIL,
    WINDOW_START,
    num_rows_in_use,
    row_value,
    set_row_value,
)
from vllm_triforce.kernels.rows import Rows


class PassInputs:
    """Inputs of a model's pass, ``query_len`` tokens for each row."""

    def __init__(self, max_rows: int, query_len: int, num_seqs: int, device) -> None:
        num_tokens = max_rows * query_len
        self.query_len = query_len
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((num_seqs,), query_len, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class WindowLayout:
    """Layout of level 1's windows in the draft model's cache."""

    capacity: int  # tokens of a window
    block_size: int  # tokens
    blocks_per_slot: int


class PoolSlots(Protocol):
    """Pool of level 2 for layers in host memory (``offload/pool.py``)."""

    width: int
    """Blocks of a slot."""
    slot_mapping: torch.Tensor
    """[max_rows * (gamma + 1)], int64, where the tokens go in the pool."""


def prepare_window_inputs(
    rows: Rows,
    inputs: PassInputs,  # written
    padded_rows: int,
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32
    num_sinks: int,
    window: WindowLayout,
) -> None:
    """Prepare the newest ``inputs.query_len`` tokens of each row, at their places in its window."""
    _window_inputs_kernel[(padded_rows,)](
        rows.table,
        rows.max_rows,
        all_token_ids,
        all_token_ids.stride(0),
        rows.proposal,
        rows.num_speculative_tokens,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        num_sinks,
        window.capacity,
        window.block_size,
        window.blocks_per_slot,
        inputs.query_len,
        PADDED_LEN=triton.next_power_of_2(inputs.query_len),
    )


def prepare_draft_inputs(
    rows: Rows,
    inputs: PassInputs,  # written; its lengths are those of the pass before
    padded_rows: int,
    step: int,
    window: WindowLayout,
) -> None:
    """Prepare level 1's newest token of each row, after the tokens of the pass before."""
    _draft_inputs_kernel[(padded_rows,)](
        rows.table,
        rows.max_rows,
        rows.drafted,
        rows.gamma,
        step,
        inputs.seq_lens,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        window.capacity,
        window.block_size,
        window.blocks_per_slot,
    )


def prepare_target_inputs(
    rows: Rows,
    inputs: PassInputs,  # written; ``seq_lens`` has one per KV head
    padded_rows: int,
    tables: torch.Tensor,  # [num_rows, table_width], int32
    dense_seq_lens: torch.Tensor,  # [max_rows], int32, written
    block_size: int,
    max_position: int,
    pool: PoolSlots | None = None,  # its slot mapping is written
) -> None:
    """Prepare the newest token of each row and its drafts, for level 2."""
    num_kv_heads = len(inputs.seq_lens) // len(dense_seq_lens)
    _target_inputs_kernel[(padded_rows,)](
        rows.table,
        rows.max_rows,
        rows.proposal,
        rows.num_speculative_tokens,
        rows.drafted,
        rows.gamma,
        tables,
        tables.stride(0),
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        dense_seq_lens,
        inputs.slot_mapping if pool is None else pool.slot_mapping,
        0 if pool is None else pool.width,
        block_size,
        max_position,
        num_kv_heads,
        HAS_POOL=pool is not None,
        PADDED_LEN=triton.next_power_of_2(rows.gamma + 1),
        PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
    )


@triton.jit
def token_at(all_token_ids, state_row, proposal_row, computed, index):
    """Load token ``index`` of a request: one that vLLM knows, or one of the proposal."""
    known = tl.load(all_token_ids + state_row + index, mask=(index >= 0) & (index <= computed))
    proposed = tl.load(proposal_row + index - computed - 1, mask=index > computed)
    return tl.where(index > computed, proposed.to(tl.int32), known)


@triton.jit
def _window_inputs_kernel(
    table_ptr,
    max_rows,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    token_stride,
    proposal_ptr,  # [max_rows, num_speculative_tokens]
    num_speculative_tokens,
    input_ids_ptr,  # [padded rows * query_len], written, as are the three below
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,  # [padded rows]
    num_sinks,
    capacity,
    block_size,
    blocks_per_slot,
    query_len,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    if row >= num_rows_in_use(table_ptr, max_rows):
        tl.store(input_ids_ptr + out, 0, mask=mask)
        tl.store(positions_ptr + out, 0, mask=mask)
        tl.store(slot_mapping_ptr + out, -1, mask=mask)
        tl.store(seq_lens_ptr + row, query_len)
        return
    state = row_value(table_ptr, max_rows, row, STATE).to(tl.int64)
    slot = row_value(table_ptr, max_rows, row, SLOT)
    start = row_value(table_ptr, max_rows, row, WINDOW_START)
    computed = row_value(table_ptr, max_rows, row, COMPUTED)
    newest = computed + row_value(table_ptr, max_rows, row, LENGTH)
    index = newest - query_len + 1 + j
    position = tl.where(index < num_sinks, index, num_sinks + index - start)
    in_window = (index >= 0) & ((index < num_sinks) | (index >= start)) & (position < capacity)
    in_window = in_window & mask
    token = token_at(
        all_token_ids_ptr,
        state * token_stride,
        proposal_ptr + row * num_speculative_tokens,
        computed,
        tl.where(in_window, index, 0),
    )
    block = slot * blocks_per_slot + position // block_size
    place = (block * block_size + position % block_size).to(tl.int64)
    tl.store(input_ids_ptr + out, tl.where(in_window, token, 0), mask=mask)
    tl.store(positions_ptr + out, tl.where(in_window, position, 0).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(in_window, place, -1), mask=mask)
    seq_len = tl.where(newest < num_sinks, newest, num_sinks + newest - start) + 1
    tl.store(seq_lens_ptr + row, tl.minimum(tl.maximum(seq_len, query_len), capacity))


@triton.jit(do_not_specialize=["step"])
def _draft_inputs_kernel(
    table_ptr,
    max_rows,
    drafted_ptr,  # [max_rows, gamma]
    gamma,
    step,
    seq_lens_ptr,  # [padded rows], of the pass before; updated
    input_ids_ptr,  # [padded rows], written
    positions_ptr,
    slot_mapping_ptr,
    capacity,
    block_size,
    blocks_per_slot,
):
    row = tl.program_id(0)
    if row >= num_rows_in_use(table_ptr, max_rows):
        tl.store(input_ids_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slot_mapping_ptr + row, -1)
        tl.store(seq_lens_ptr + row, 1)
        return
    position = tl.load(seq_lens_ptr + row)
    fits = position < capacity
    position = tl.minimum(position, capacity - 1)
    slot = row_value(table_ptr, max_rows, row, SLOT)
    block = slot * blocks_per_slot + position // block_size
    place = (block * block_size + position % block_size).to(tl.int64)
    tl.store(input_ids_ptr + row, tl.load(drafted_ptr + row * gamma + step - 1))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(slot_mapping_ptr + row, tl.where(fits, place, -1))
    tl.store(seq_lens_ptr + row, position + 1)


@triton.jit
def _target_inputs_kernel(
    table_ptr,  # the drafts of a row are cut to its room
    max_rows,
    proposal_ptr,  # [max_rows, num_speculative_tokens]
    num_speculative_tokens,
    drafted_ptr,  # [max_rows, gamma]
    gamma,
    tables_ptr,  # [num_rows, table_width]
    table_stride,
    input_ids_ptr,  # [padded rows * (gamma + 1)], written, as are all below
    positions_ptr,
    slot_mapping_ptr,
    sparse_seq_lens_ptr,  # [padded rows * num_kv_heads]
    dense_seq_lens_ptr,  # [padded rows]
    pool_mapping_ptr,  # [padded rows * (gamma + 1)], as slot_mapping, in the pool of the row's slot
    pool_width,  # blocks of a slot
    block_size,
    max_position,
    num_kv_heads,
    HAS_POOL: tl.constexpr,
    PADDED_LEN: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
):
    row = tl.program_id(0)
    query_len = gamma + 1
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    heads = tl.arange(0, PADDED_HEADS)
    seq_lens = sparse_seq_lens_ptr + row * num_kv_heads + heads
    computed = row_value(table_ptr, max_rows, row, COMPUTED)
    length = row_value(table_ptr, max_rows, row, LENGTH)
    missing = row_value(table_ptr, max_rows, row, ROOM) - length
    if (row >= num_rows_in_use(table_ptr, max_rows)) | (missing <= 0):
        set_row_value(table_ptr, max_rows, row, NUM_DRAFTED, 0)
        tl.store(input_ids_ptr + out, 0, mask=mask)
        tl.store(positions_ptr + out, 0, mask=mask)
        tl.store(slot_mapping_ptr + out, -1, mask=mask)
        tl.store(seq_lens, query_len, mask=heads < num_kv_heads)
        tl.store(dense_seq_lens_ptr + row, query_len)
        if HAS_POOL:
            tl.store(pool_mapping_ptr + out, -1, mask=mask)
        return
    # The pass adds a token, so one less is drafted.
    num_drafted = tl.minimum(row_value(table_ptr, max_rows, row, NUM_DRAFTED), missing - 1)
    set_row_value(table_ptr, max_rows, row, NUM_DRAFTED, num_drafted)
    newest = tl.load(proposal_ptr + row * num_speculative_tokens + length - 1, mask=length > 0)
    last_token = row_value(table_ptr, max_rows, row, LAST_TOKEN)
    newest = tl.where(length > 0, newest.to(tl.int32), last_token)
    is_draft = (j > 0) & (j <= num_drafted)
    draft = tl.load(drafted_ptr + row * gamma + j - 1, mask=is_draft, other=0)
    position = computed + length + j
    valid = mask & (j <= num_drafted)
    block = tl.load(tables_ptr + row * table_stride + position // block_size, mask=valid, other=0)
    place = block.to(tl.int64) * block_size + position % block_size
    tl.store(input_ids_ptr + out, tl.where(j == 0, newest, draft), mask=mask)
    tl.store(positions_ptr + out, tl.minimum(position, max_position).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(valid, place, -1), mask=mask)
    if HAS_POOL:
        tail = row_value(table_ptr, max_rows, row, TAIL)
        index = row_value(table_ptr, max_rows, row, NUM_SELECTED) + position // block_size - tail
        fits = valid & (index < pool_width)
        index += row_value(table_ptr, max_rows, row, SLOT) * pool_width
        place = index.to(tl.int64) * block_size + position % block_size
        tl.store(pool_mapping_ptr + out, tl.where(fits, place, -1), mask=mask)
    seq_len = computed + length + query_len
    sparse = seq_len - row_value(table_ptr, max_rows, row, SKIPPED)
    tl.store(seq_lens, sparse + tl.zeros_like(heads), mask=heads < num_kv_heads)
    tl.store(dense_seq_lens_ptr + row, seq_len)
