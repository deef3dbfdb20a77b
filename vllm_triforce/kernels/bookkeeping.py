"""What happens between the models' passes, on the device: rows, inputs and outcomes.

A *row* is a request in this proposal, a *slot* its place in what TriForce keeps between
proposals, a *state* its place in the model runner's tensors.
"""

import torch
from vllm.triton_utils import tl, triton

# Columns of the table that the host sends, one line a row.
BATCH_ROW, STATE, SLOT, IS_DUE, RESERVED, LIMIT, WINDOW_START = range(7)
NUM_COLUMNS = 7

# Where nothing was proposed; see worker/v2/proposal.py.
PAD_TOKEN = 0


@triton.jit
def begin_rows_kernel(
    hosted_ptr,  # [num_rows, NUM_COLUMNS]
    num_rows,
    num_computed_ptr,  # [max_num_reqs], by state
    num_sampled_ptr,  # [batch size]
    last_sampled_ptr,  # [max_num_reqs, 1], by state
    slot_tail_ptr,  # [num_slots], kept
    slot_known_ptr,  # [num_slots], kept
    slot_fault_ptr,  # [num_slots], kept
    row_fault_ptr,  # [padded rows], written
    computed_ptr,  # [padded rows], and so are all below; written
    last_token_ptr,
    room_ptr,
    length_ptr,
    tail_ptr,
    num_selected_ptr,
    skipped_ptr,
    num_blocks_ptr,
    first_fresh_ptr,
    last_fresh_ptr,
    num_speculative_tokens,
    min_context,
    least_tokens,
    block_size,
    recent_blocks,
    max_selected,
    width,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    computed = 0
    room = 0
    tail = 0
    selected = 0
    num_blocks = 0
    first = 0
    last = 0
    token = 0
    tl.store(row_fault_ptr + row, 0)
    if row < num_rows:
        row_metadata = hosted_ptr + row * COLUMNS
        state = tl.load(row_metadata + 1)
        slot = tl.load(row_metadata + 2)
        is_due = tl.load(row_metadata + 3)
        if is_due == 2:
            tl.store(slot_fault_ptr + slot, 0)
        reserved = tl.load(row_metadata + 4)
        limit = tl.load(row_metadata + 5)
        computed = tl.load(num_computed_ptr + state).to(tl.int32)
        token = tl.load(last_sampled_ptr + state).to(tl.int32)
        num_full = computed // block_size
        num_blocks = reserved // block_size
        if is_due != 0:
            tail = tl.maximum(num_full - recent_blocks, 0)
            # 2: the slot has a new owner.
            first = tl.where(is_due == 2, 0, tl.load(slot_known_ptr + slot))
            last = num_full
            tl.store(slot_tail_ptr + slot, tail)
            tl.store(slot_known_ptr + slot, num_full)
        else:
            tail = tl.load(slot_tail_ptr + slot)
        selected = tl.minimum(tail, max_selected)
        room = tl.minimum(num_speculative_tokens, reserved - computed)
        # The scheduler keeps inputs below max_model_len - 1 (v1/core/sched/scheduler.py), and the
        # full pass adds a token of its own.
        room = tl.minimum(room, limit - 2 - computed)
        reach = tl.cdiv(computed + num_speculative_tokens + 1, block_size) - tail + selected
        is_ready = tl.load(num_sampled_ptr + tl.load(row_metadata)) > 0
        is_ready = is_ready & (computed >= min_context)
        is_ready = is_ready & (computed >= least_tokens) & (reach <= width)
        is_ready = is_ready & (tl.load(slot_fault_ptr + slot) == 0)
        room = tl.where(is_ready, tl.maximum(room, 0), 0)
    tl.store(computed_ptr + row, computed)
    tl.store(last_token_ptr + row, token)
    tl.store(room_ptr + row, room)
    tl.store(length_ptr + row, 0)
    tl.store(tail_ptr + row, tail)
    tl.store(num_selected_ptr + row, selected)
    tl.store(skipped_ptr + row, (tail - selected) * block_size)
    tl.store(num_blocks_ptr + row, num_blocks)
    tl.store(first_fresh_ptr + row, first)
    tl.store(last_fresh_ptr + row, last)


@triton.jit
def token_at(all_token_ids, state_row, proposal_row, computed, index):
    """Token ``index`` of a request: one that vLLM knows, or one of the proposal."""
    known = tl.load(all_token_ids + state_row + index, mask=(index >= 0) & (index <= computed))
    proposed = tl.load(proposal_row + index - computed - 1, mask=index > computed)
    return tl.where(index > computed, proposed.to(tl.int32), known)


@triton.jit
def feed_window_kernel(
    hosted_ptr,
    num_rows,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    token_stride,
    proposal_ptr,  # [padded rows, num_speculative_tokens]
    num_speculative_tokens,
    computed_ptr,
    length_ptr,
    input_ids_ptr,  # [padded rows * query_len], written, as are the three below
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,  # [padded rows]
    num_sinks,
    capacity,
    block_size,
    blocks_per_slot,
    query_len,
    COLUMNS: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    if row >= num_rows:
        tl.store(input_ids_ptr + out, 0, mask=mask)
        tl.store(positions_ptr + out, 0, mask=mask)
        tl.store(slot_mapping_ptr + out, -1, mask=mask)
        tl.store(seq_lens_ptr + row, query_len)
        return
    state = tl.load(hosted_ptr + row * COLUMNS + 1).to(tl.int64)
    slot = tl.load(hosted_ptr + row * COLUMNS + 2)
    start = tl.load(hosted_ptr + row * COLUMNS + 6)
    computed = tl.load(computed_ptr + row)
    newest = computed + tl.load(length_ptr + row)
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


@triton.jit
def feed_draft_kernel(
    hosted_ptr,
    num_rows,
    drafted_ptr,  # [padded rows, gamma]
    gamma,
    step,
    seq_lens_ptr,  # [padded rows], of the pass before; updated
    input_ids_ptr,  # [padded rows], written
    positions_ptr,
    slot_mapping_ptr,
    capacity,
    block_size,
    blocks_per_slot,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= num_rows:
        tl.store(input_ids_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slot_mapping_ptr + row, -1)
        tl.store(seq_lens_ptr + row, 1)
        return
    position = tl.load(seq_lens_ptr + row)
    fits = position < capacity
    position = tl.minimum(position, capacity - 1)
    block = tl.load(hosted_ptr + row * COLUMNS + 2) * blocks_per_slot + position // block_size
    place = (block * block_size + position % block_size).to(tl.int64)
    tl.store(input_ids_ptr + row, tl.load(drafted_ptr + row * gamma + step - 1))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(slot_mapping_ptr + row, tl.where(fits, place, -1))
    tl.store(seq_lens_ptr + row, position + 1)


@triton.jit
def feed_target_kernel(
    hosted_ptr,
    num_rows,
    tables_ptr,  # [num_rows, table_width]
    table_stride,
    proposal_ptr,  # [padded rows, num_speculative_tokens]
    num_speculative_tokens,
    drafted_ptr,  # [padded rows, gamma]
    num_drafted_ptr,  # [padded rows]; lowered to what there is room for
    computed_ptr,
    length_ptr,
    room_ptr,
    last_token_ptr,
    skipped_ptr,
    input_ids_ptr,  # [padded rows * (gamma + 1)], written, as are all below
    positions_ptr,
    slot_mapping_ptr,
    sparse_seq_lens_ptr,  # [padded rows * num_kv_heads]
    dense_seq_lens_ptr,  # [padded rows]
    places_ptr,  # [padded rows]
    block_size,
    max_position,
    num_kv_heads,
    gamma,
    COLUMNS: tl.constexpr,
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
    computed = tl.load(computed_ptr + row)
    length = tl.load(length_ptr + row)
    missing = tl.load(room_ptr + row) - length
    if (row >= num_rows) | (missing <= 0):
        tl.store(num_drafted_ptr + row, 0)
        tl.store(input_ids_ptr + out, 0, mask=mask)
        tl.store(positions_ptr + out, 0, mask=mask)
        tl.store(slot_mapping_ptr + out, -1, mask=mask)
        tl.store(seq_lens, query_len, mask=heads < num_kv_heads)
        tl.store(dense_seq_lens_ptr + row, query_len)
        return
    # The pass adds a token of its own, hence one less to draft.
    drafted = tl.minimum(tl.load(num_drafted_ptr + row), missing - 1)
    tl.store(num_drafted_ptr + row, drafted)
    newest = tl.load(proposal_ptr + row * num_speculative_tokens + length - 1, mask=length > 0)
    newest = tl.where(length > 0, newest.to(tl.int32), tl.load(last_token_ptr + row))
    is_draft = (j > 0) & (j <= drafted)
    draft = tl.load(drafted_ptr + row * gamma + j - 1, mask=is_draft, other=0)
    position = computed + length + j
    valid = mask & (j <= drafted)
    block = tl.load(tables_ptr + row * table_stride + position // block_size, mask=valid, other=0)
    place = block.to(tl.int64) * block_size + position % block_size
    tl.store(input_ids_ptr + out, tl.where(j == 0, newest, draft), mask=mask)
    tl.store(positions_ptr + out, tl.minimum(position, max_position).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(valid, place, -1), mask=mask)
    seq_len = computed + length + query_len
    sparse = seq_len - tl.load(skipped_ptr + row)
    tl.store(seq_lens, sparse + tl.zeros_like(heads), mask=heads < num_kv_heads)
    tl.store(dense_seq_lens_ptr + row, seq_len)
    tl.store(places_ptr + row, computed + length + 1)


@triton.jit
def finish_rows_kernel(
    draft_tokens_ptr,  # [batch size, num_speculative_tokens], written
    row_of_batch_ptr,  # [batch size], -1 where a request was not speculated on
    states_ptr,  # [batch size]
    proposal_ptr,  # [padded rows, num_speculative_tokens]
    length_ptr,  # [padded rows]
    num_proposed_ptr,  # [max_num_reqs], by state, written
    counters_ptr,  # [2], added to: proposals, proposed tokens
    num_speculative_tokens,
    PAD: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    batch_row = tl.program_id(0)
    row = tl.load(row_of_batch_ptr + batch_row)
    places = tl.arange(0, PADDED_LEN)
    mask = places < num_speculative_tokens
    length = 0
    if row >= 0:
        length = tl.load(length_ptr + row)
        if length > 0:
            tl.atomic_add(counters_ptr, 1)
            tl.atomic_add(counters_ptr + 1, length.to(tl.int64))
    source = proposal_ptr + tl.maximum(row, 0) * num_speculative_tokens
    token = tl.load(source + places, mask=places < length, other=PAD)
    tl.store(draft_tokens_ptr + batch_row * num_speculative_tokens + places, token, mask=mask)
    tl.store(num_proposed_ptr + tl.load(states_ptr + batch_row), length)


@triton.jit
def _count_full_pass_kernel(
    counters_ptr,  # [4], added to: drafted, accepted, rejections, steps
    scheduled_ptr,  # [batch size]
    states_ptr,  # [batch size]
    num_sampled_ptr,  # [batch size]
    num_proposed_ptr,  # [max_num_reqs]
):
    row = tl.program_id(0)
    proposed = tl.load(num_proposed_ptr + tl.load(states_ptr + row))
    drafted = tl.minimum(tl.load(scheduled_ptr + row), proposed)
    sampled = tl.load(num_sampled_ptr + row).to(tl.int32)
    if (drafted > 0) & (sampled > 0):
        accepted = tl.minimum(sampled - 1, drafted)
        tl.atomic_add(counters_ptr, drafted.to(tl.int64))
        tl.atomic_add(counters_ptr + 1, accepted.to(tl.int64))
        tl.atomic_add(counters_ptr + 2, (accepted < drafted).to(tl.int64))
        tl.atomic_add(counters_ptr + 3, 1)


def count_full_pass(
    counters: torch.Tensor,  # [4], int64
    scheduled: torch.Tensor,  # [batch size], int32, draft tokens that were verified
    states: torch.Tensor,  # [batch size], int
    num_sampled: torch.Tensor,  # [batch size], int
    num_proposed: torch.Tensor,  # [max_num_reqs], int32
) -> None:
    """Adds up the outcome of level 3. Padding behind a proposal does not count."""
    _count_full_pass_kernel[(len(scheduled),)](
        counters, scheduled, states, num_sampled, num_proposed
    )
