"""What happens between the models' passes, on the device: rows, inputs and outcomes.

A *row* is a request in this proposal, a *slot* its place in what TriForce keeps between
proposals, a *state* its place in the model runner's tensors.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as _outcomes
from vllm_triforce.kernels.counters import (
    NUM_DIRECT_PROPOSALS,
    NUM_LEVEL2_ACCEPTED,
    NUM_LEVEL2_DRAFTED,
    NUM_LEVEL3_REJECTIONS,
    NUM_LEVEL3_STEPS,
    NUM_PROPOSALS,
    NUM_PROPOSED,
)
from vllm_triforce.kernels.row_table import (
    BATCH_ROW,
    LIMIT,
    MAX_ROUNDS,
    MAX_TOKENS,
    NEW_OWNER,
    NOT_DUE,
    REFRESH,
    RESERVED,
    SLOT,
    STATE,
    UNUSED,
    row_value,
)

_NUM_OUTCOMES, _NUM_PROPOSED = _outcomes.NUM_OUTCOMES, _outcomes.NUM_PROPOSED
# Where nothing was proposed; see runner_v2/speculator.py.
PAD_TOKEN = 0


@triton.jit(do_not_specialize=["num_rows"])
def init_rows_kernel(
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    num_rows,
    num_rows_ptr,  # [1], written
    num_computed_ptr,  # [max_num_reqs], by state
    num_sampled_ptr,  # [batch size]
    last_sampled_ptr,  # [max_num_reqs, 1], by state
    temperatures_ptr,  # [max_num_reqs], by state
    seeds_ptr,  # [max_num_reqs], by state
    top_ks_ptr,  # [max_num_reqs], by state
    top_ps_ptr,  # [max_num_reqs], by state
    min_ps_ptr,  # [max_num_reqs], by state
    slot_tail_ptr,  # [num_slots], kept
    slot_known_ptr,  # [num_slots], kept
    slot_fault_ptr,  # [num_slots], kept
    row_fault_ptr,  # [padded rows], written
    computed_ptr,  # [padded rows], and so are all below; written
    last_token_ptr,
    room_ptr,
    rounds_left_ptr,
    length_ptr,
    tail_ptr,
    num_selected_ptr,
    skipped_ptr,
    num_blocks_ptr,
    first_newly_full_ptr,
    last_newly_full_ptr,
    temperature_ptr,
    divisor_ptr,
    seed_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    outcomes_ptr,  # [padded rows, NUM_OUTCOMES], written
    vocab_size,
    num_speculative_tokens,
    min_context,
    min_tokens,
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
    tl.store(num_rows_ptr, num_rows, mask=row == 0)
    tl.store(row_fault_ptr + row, 0)
    if row < num_rows:
        state = row_value(row_metadata_ptr, row, STATE)
        slot = row_value(row_metadata_ptr, row, SLOT)
        refresh = row_value(row_metadata_ptr, row, REFRESH)
        reserved = row_value(row_metadata_ptr, row, RESERVED)
        limit = row_value(row_metadata_ptr, row, LIMIT)
        computed = tl.load(num_computed_ptr + state).to(tl.int32)
        token = tl.load(last_sampled_ptr + state).to(tl.int32)
        temperature = tl.load(temperatures_ptr + state)
        top_k = tl.load(top_ks_ptr + state)
        top_p = tl.load(top_ps_ptr + state)
        min_p = tl.load(min_ps_ptr + state)
        tl.store(seed_ptr + row, tl.load(seeds_ptr + state))
        num_full = computed // block_size
        num_blocks = reserved // block_size
        if refresh == UNUSED:
            tail = num_full
        elif refresh != NOT_DUE:
            tail = tl.maximum(num_full - recent_blocks, 0)
            first = tl.where(refresh == NEW_OWNER, 0, tl.load(slot_known_ptr + slot))
            last = num_full
            tl.store(slot_tail_ptr + slot, tail)
            tl.store(slot_known_ptr + slot, num_full)
        else:
            tail = tl.load(slot_tail_ptr + slot)
        selected = tl.minimum(tail, max_selected)
        rounds = row_value(row_metadata_ptr, row, MAX_ROUNDS)
        room = tl.minimum(row_value(row_metadata_ptr, row, MAX_TOKENS), reserved - computed)
        # The scheduler keeps inputs below max_model_len - 1 (v1/core/sched/scheduler.py), and the
        # full pass adds a token of its own.
        room = tl.minimum(room, limit - 2 - computed)
        reach = tl.cdiv(computed + num_speculative_tokens + 1, block_size) - tail + selected
        is_ready = tl.load(num_sampled_ptr + row_value(row_metadata_ptr, row, BATCH_ROW)) > 0
        is_ready = is_ready & (computed >= min_context)
        is_ready = is_ready & (computed >= min_tokens) & ((reach <= width) | (refresh == UNUSED))
        is_ready = is_ready & (tl.load(slot_fault_ptr + slot) == 0)
        room = tl.where(is_ready & (rounds > 0), tl.maximum(room, 0), 0)
    tl.store(computed_ptr + row, computed)
    tl.store(last_token_ptr + row, token)
    tl.store(temperature_ptr + row, temperature)
    tl.store(divisor_ptr + row, tl.where(temperature > 0, temperature, 1.0))
    tl.store(top_k_ptr + row, top_k)
    tl.store(top_p_ptr + row, top_p)
    tl.store(min_p_ptr + row, min_p)
    tl.store(room_ptr + row, room)
    tl.store(rounds_left_ptr + row, rounds)
    tl.store(length_ptr + row, 0)
    tl.store(tail_ptr + row, tail)
    tl.store(num_selected_ptr + row, selected)
    tl.store(skipped_ptr + row, (tail - selected) * block_size)
    tl.store(num_blocks_ptr + row, num_blocks)
    tl.store(first_newly_full_ptr + row, first)
    tl.store(last_newly_full_ptr + row, last)
    for column in tl.static_range(_NUM_OUTCOMES):
        tl.store(outcomes_ptr + row * _NUM_OUTCOMES + column, 0)


@triton.jit
def commit_rows_kernel(
    draft_tokens_ptr,  # [batch size, num_speculative_tokens], written
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    proposal_ptr,  # [num_rows, num_speculative_tokens]
    length_ptr,  # [num_rows]
    num_proposed_ptr,  # [max_num_reqs], by state, written
    slot_of_state_ptr,  # [max_num_reqs], written
    state_of_slot_ptr,  # [num_slots], written
    outcomes_ptr,  # [num_rows, NUM_OUTCOMES], written
    counters_ptr,  # [num_counters], added to
    num_speculative_tokens,
    IS_DIRECT: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.load(length_ptr + row)
    if length > 0:
        tl.atomic_add(counters_ptr + NUM_PROPOSALS, 1)
        tl.atomic_add(counters_ptr + NUM_PROPOSED, length.to(tl.int64))
        if IS_DIRECT:
            tl.atomic_add(counters_ptr + NUM_DIRECT_PROPOSALS, 1)
    places = tl.arange(0, PADDED_LEN)
    token = tl.load(proposal_ptr + row * num_speculative_tokens + places, mask=places < length)
    out = draft_tokens_ptr + row_value(row_metadata_ptr, row, BATCH_ROW) * num_speculative_tokens
    tl.store(out + places, token, mask=places < length)
    state = row_value(row_metadata_ptr, row, STATE)
    slot = row_value(row_metadata_ptr, row, SLOT)
    tl.store(num_proposed_ptr + state, length)
    tl.store(slot_of_state_ptr + state, slot)
    tl.store(state_of_slot_ptr + slot, state)
    tl.store(outcomes_ptr + row * _NUM_OUTCOMES + _NUM_PROPOSED, length)


@triton.jit
def _count_full_pass_kernel(
    counters_ptr,  # [num_counters], added to
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
        tl.atomic_add(counters_ptr + NUM_LEVEL2_DRAFTED, drafted.to(tl.int64))
        tl.atomic_add(counters_ptr + NUM_LEVEL2_ACCEPTED, accepted.to(tl.int64))
        tl.atomic_add(counters_ptr + NUM_LEVEL3_REJECTIONS, (accepted < drafted).to(tl.int64))
        tl.atomic_add(counters_ptr + NUM_LEVEL3_STEPS, 1)


def count_full_pass(
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
    scheduled: torch.Tensor,  # [batch size], int32, draft tokens that were verified
    states: torch.Tensor,  # [batch size], int
    num_sampled: torch.Tensor,  # [batch size], int
    num_proposed: torch.Tensor,  # [max_num_reqs], int32
) -> None:
    """Adds up the outcome of level 3. Padding behind a proposal does not count."""
    _count_full_pass_kernel[(len(scheduled),)](
        counters, scheduled, states, num_sampled, num_proposed
    )
