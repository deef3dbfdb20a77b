"""Proposals on the way to the full pass: direct ones, their commit, and their distributions.

A direct proposal has level 1's tokens alone. vLLM's outer test, the rejection sampler of the full
pass, reads the distributions by slot.
"""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table
from vllm_triforce.kernels.counters import (
    NUM_DIRECT_PROPOSALS,
    NUM_LEVEL2_ACCEPTED,
    NUM_LEVEL2_DRAFTED,
    NUM_LEVEL3_REJECTIONS,
    NUM_LEVEL3_STEPS,
    NUM_NAN_REQUESTS,
    NUM_PROPOSALS,
    NUM_PROPOSED,
)
from vllm_triforce.kernels.distributions import Distributions
from vllm_triforce.kernels.row_table import (
    BATCH_ROW,
    HAS_NAN,
    LENGTH,
    NUM_DRAFTED,
    NUM_EMITTED,
    NUM_OUTCOMES,
    ONE_HOT,
    ROOM,
    SLOT,
    STATE,
    TEMPERATURE,
    disable_slot,
    row_value,
    set_row_value,
)
from vllm_triforce.kernels.rows import Rows

PAD_TOKEN = 0
"""Stands where nothing was proposed; see ``runner_v2/speculator.py``."""
_BLOCK = 4096
_PROPOSED = row_table.NUM_PROPOSED  # the counter has the same name


@dataclass
class DraftLogits:
    """Distributions of the proposals that the outer test has yet to read."""

    logits: torch.Tensor
    """[num_slots, num_speculative_tokens, vocab_size], level 2's, by slot."""
    num_proposed: torch.Tensor  # [max_num_reqs], int32, by state
    slot_of_state: torch.Tensor  # [max_num_reqs], int32
    state_of_slot: torch.Tensor  # [num_slots], int32; -1 for none

    @classmethod
    def allocate(cls, logits: torch.Tensor, max_num_reqs: int) -> "DraftLogits":
        """Allocate the tables by state and slot, without any proposal."""
        device = logits.device
        num_proposed, slot_of_state = torch.zeros(2, max_num_reqs, dtype=torch.int32, device=device)
        state_of_slot = torch.full((len(logits),), -1, dtype=torch.int32, device=device)
        return cls(logits, num_proposed, slot_of_state, state_of_slot)


def extend_proposals(
    rows: Rows,  # with their drafts; the proposals are extended
    drafted: Distributions | None,  # level 1's, of gamma places; None where they are one-hot
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Append each row's drafts to its proposal, as far as there is room."""
    _extend_kernel[(rows.num_rows,)](
        rows.proposal,
        rows.table,
        rows.max_rows,
        rows.slots,
        counters,
        rows.drafted,
        rows.drafted if drafted is None else drafted.lse,
        rows.num_speculative_tokens,
        rows.gamma,
        IS_ONE_HOT=drafted is None,
        PADDED_LEN=triton.next_power_of_2(rows.gamma),
    )


@triton.jit
def _extend_kernel(
    proposal_ptr,  # [max_rows, num_speculative_tokens], written
    table_ptr,  # updated
    max_rows,
    slots_ptr,  # [num_slots, NUM_SLOT_COLUMNS], updated
    counters_ptr,  # [num_counters], added to
    drafted_ptr,  # [max_rows, gamma]
    lse_ptr,  # [num_rows, gamma]
    num_speculative_tokens,
    gamma,
    IS_ONE_HOT: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = row_value(table_ptr, max_rows, row, LENGTH)
    room = row_value(table_ptr, max_rows, row, ROOM)
    set_row_value(table_ptr, max_rows, row, NUM_EMITTED, 0)
    if length < room:
        places = tl.arange(0, PADDED_LEN)
        num_drafted = row_value(table_ptr, max_rows, row, NUM_DRAFTED)
        num_emitted = tl.minimum(num_drafted, room - length)
        if row_value(table_ptr, max_rows, row, HAS_NAN) != 0:
            # Tokens that were drawn before the NaN stay: whether a token is dropped must not
            # depend on the tokens after it. A greedy row has no distributions, and loses nothing.
            first_wrong = 0
            if not IS_ONE_HOT:
                lse = tl.load(lse_ptr + row * gamma + places, mask=places < gamma, other=0.0)
                is_right = (lse == lse) & (tl.abs(lse) < float("inf"))
                first_wrong = tl.min(tl.where(is_right, PADDED_LEN, places), axis=0)
            num_emitted = tl.minimum(num_emitted, first_wrong)
            num_drafted = 0
            disable_slot(table_ptr, max_rows, row, slots_ptr)
            tl.atomic_add(counters_ptr + NUM_NAN_REQUESTS, 1)
        mask = places < num_emitted
        token = tl.load(drafted_ptr + row * gamma + places, mask=mask, other=0)
        out = proposal_ptr + row * num_speculative_tokens + length
        tl.store(out + places, token.to(tl.int64), mask=mask)
        if num_drafted < gamma:  # the source has no more
            set_row_value(table_ptr, max_rows, row, ROOM, length + num_emitted)
        set_row_value(table_ptr, max_rows, row, LENGTH, length + num_emitted)
        set_row_value(table_ptr, max_rows, row, NUM_EMITTED, num_emitted)


def export_distributions(
    draft_logits: DraftLogits,  # written
    rows: Rows,  # after emission
    logits: torch.Tensor | None,  # [num_rows, num_places, vocab_size], masked; None: all one-hot
) -> None:
    """Copy the logits that the newest tokens were drawn from to the outer test's tensor.

    Rows with ``RowColumn.ONE_HOT`` export one-hot distributions. A grammar cuts a proposal at a
    place that depends on its tokens, and one-hot distributions keep the test of the rest exact.
    Without logits nothing was drawn, and all rows are one-hot.
    """
    num_places = rows.gamma if logits is None else logits.shape[1]
    vocab_size = draft_logits.logits.shape[2] if logits is None else logits.shape[2]
    _export_kernel[(rows.num_rows, num_places, triton.cdiv(vocab_size, _BLOCK))](
        draft_logits.logits,
        draft_logits.logits.stride(0),
        draft_logits.logits.stride(1),
        rows.table,
        rows.max_rows,
        rows.floats,
        draft_logits.logits if logits is None else logits,
        rows.proposal,
        rows.num_speculative_tokens,
        vocab_size,
        ALL_ONE_HOT=logits is None,
        BLOCK=_BLOCK,
    )


@triton.jit
def _export_kernel(
    draft_logits_ptr,  # [num_slots, num_speculative_tokens, vocab_stride], written
    slot_stride,
    place_stride,
    table_ptr,  # after emission
    max_rows,
    floats_ptr,
    logits_ptr,  # [num_rows, places, vocab_size]; not read where ALL_ONE_HOT
    proposal_ptr,  # [max_rows, num_speculative_tokens]
    num_speculative_tokens,
    vocab_size,
    ALL_ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_emitted = row_value(table_ptr, max_rows, row, NUM_EMITTED)
    place = tl.program_id(1)
    temperature = row_value(floats_ptr, max_rows, row, TEMPERATURE)
    if (place >= num_emitted) | (temperature == 0.0):
        return
    slot = row_value(table_ptr, max_rows, row, SLOT).to(tl.int64)
    index = row_value(table_ptr, max_rows, row, LENGTH) - num_emitted + place
    tokens = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    if ALL_ONE_HOT:
        token = tl.load(proposal_ptr + row * num_speculative_tokens + index)
        logits = tl.where(tokens == token, 0.0, float("-inf"))
    else:
        source = logits_ptr + (row * tl.num_programs(1) + place) * vocab_size
        logits = tl.load(source + tokens, mask=mask)
        if row_value(table_ptr, max_rows, row, ONE_HOT) != 0:
            token = tl.load(proposal_ptr + row * num_speculative_tokens + index)
            logits = tl.where(tokens == token, 0.0, float("-inf")).to(logits.dtype)
    out = draft_logits_ptr + slot * slot_stride + index * place_stride
    tl.store(out + tokens, logits.to(draft_logits_ptr.dtype.element_ty), mask=mask)


def commit_proposals(
    rows: Rows,
    draft_tokens: torch.Tensor,  # [batch size, num_speculative_tokens], int64, written
    draft_logits: DraftLogits,  # written
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
    is_direct: bool,
) -> None:
    """Copy the proposals to the batch, whose other places stay as they are.

    Args:
        is_direct: True if they are level 1's alone.
    """
    _commit_kernel[(rows.num_rows,)](
        draft_tokens,
        draft_logits.num_proposed,
        draft_logits.slot_of_state,
        draft_logits.state_of_slot,
        rows.outcomes,
        counters,
        rows.table,
        rows.max_rows,
        rows.proposal,
        rows.num_speculative_tokens,
        IS_DIRECT=is_direct,
        PADDED_LEN=triton.next_power_of_2(rows.num_speculative_tokens),
    )


@triton.jit
def _commit_kernel(
    draft_tokens_ptr,  # [batch size, num_speculative_tokens], written
    num_proposed_ptr,  # [max_num_reqs], by state, written
    slot_of_state_ptr,  # [max_num_reqs], written
    state_of_slot_ptr,  # [num_slots], written
    outcomes_ptr,  # [max_rows, NUM_OUTCOMES], written
    counters_ptr,  # [num_counters], added to
    table_ptr,
    max_rows,
    proposal_ptr,  # [max_rows, num_speculative_tokens]
    num_speculative_tokens,
    IS_DIRECT: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    length = row_value(table_ptr, max_rows, row, LENGTH)
    if length > 0:
        tl.atomic_add(counters_ptr + NUM_PROPOSALS, 1)
        tl.atomic_add(counters_ptr + NUM_PROPOSED, length.to(tl.int64))
        if IS_DIRECT:
            tl.atomic_add(counters_ptr + NUM_DIRECT_PROPOSALS, 1)
    places = tl.arange(0, PADDED_LEN)
    token = tl.load(proposal_ptr + row * num_speculative_tokens + places, mask=places < length)
    batch_row = row_value(table_ptr, max_rows, row, BATCH_ROW)
    out = draft_tokens_ptr + batch_row * num_speculative_tokens
    tl.store(out + places, token, mask=places < length)
    state = row_value(table_ptr, max_rows, row, STATE)
    slot = row_value(table_ptr, max_rows, row, SLOT)
    tl.store(num_proposed_ptr + state, length)
    tl.store(slot_of_state_ptr + state, slot)
    tl.store(state_of_slot_ptr + slot, state)
    tl.store(outcomes_ptr + row * NUM_OUTCOMES + _PROPOSED, length)


@dataclass
class OuterTestRows:
    """Arguments of vLLM's outer test, instead of those that vLLM would pass."""

    owners: torch.Tensor
    """[num_logits], int32: a slot, or for rows without a proposal ``num_slots`` + state."""
    places: torch.Tensor  # [num_logits], int32
    draft_tokens: torch.Tensor  # [num_logits]; -1 where nothing was proposed
    temperature: torch.Tensor  # [num_slots + max_num_reqs], by owner
    seeds: torch.Tensor  # [num_slots + max_num_reqs], int64, by owner


def outer_test_rows(
    draft_logits: DraftLogits,
    states: torch.Tensor,  # [num_logits], int32, each row's request
    places: torch.Tensor,  # [num_logits], int32, each row's place among the request's rows
    draft_tokens: torch.Tensor,  # [num_logits], input tokens of the full pass
    temperature: torch.Tensor,  # [max_num_reqs], float32, by state
    seeds: torch.Tensor,  # [max_num_reqs], int64, by state
) -> OuterTestRows:
    """Map each row of the outer test to its distribution; rows without a proposal have none.

    Places without a proposed token are tested as -1. The test rejects this token without reading a
    distribution and draws from the target alone, which is exact.
    """
    num_logits, num_slots = len(states), len(draft_logits.state_of_slot)
    num_owners = num_slots + len(temperature)
    rows = OuterTestRows(
        torch.empty_like(states),
        torch.empty_like(places),
        torch.empty_like(draft_tokens),
        torch.empty(num_owners, dtype=temperature.dtype, device=states.device),
        torch.empty(num_owners, dtype=seeds.dtype, device=states.device),
    )
    _outer_test_kernel[(triton.cdiv(max(num_logits, num_owners), 1024),)](
        rows.owners,
        rows.places,
        rows.draft_tokens,
        rows.temperature,
        rows.seeds,
        states,
        places,
        draft_tokens,
        temperature,
        seeds,
        draft_logits.num_proposed,
        draft_logits.slot_of_state,
        draft_logits.state_of_slot,
        num_logits,
        num_owners,
        num_slots,
        draft_logits.logits.shape[1],
        BLOCK=1024,
    )
    return rows


@triton.jit(do_not_specialize=["num_logits", "num_owners"])
def _outer_test_kernel(
    owners_ptr,  # [num_logits], written
    places_ptr,  # [num_logits], written
    tested_ptr,  # [num_logits], written
    temperatures_ptr,  # [num_owners], written
    seeds_ptr,  # [num_owners], written
    states_ptr,  # [num_logits]
    local_places_ptr,  # [num_logits]
    draft_tokens_ptr,  # [num_logits]
    state_temperature_ptr,  # [max_num_reqs]
    state_seeds_ptr,  # [max_num_reqs]
    num_proposed_ptr,  # [max_num_reqs]
    slot_of_state_ptr,  # [max_num_reqs]
    state_of_slot_ptr,  # [num_slots]
    num_logits,
    num_owners,
    num_slots,
    num_speculative_tokens,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_logits
    state = tl.load(states_ptr + index, mask=mask, other=0)
    slot = tl.load(slot_of_state_ptr + state, mask=mask, other=0)
    # A slot with a new owner has the new owner's distributions.
    is_owner = tl.load(state_of_slot_ptr + slot, mask=mask, other=-1) == state
    proposed = tl.where(is_owner, tl.load(num_proposed_ptr + state, mask=mask, other=0), 0)
    place = tl.load(local_places_ptr + index, mask=mask, other=0)
    token = tl.load(draft_tokens_ptr + index, mask=mask, other=0)
    is_greedy = tl.load(state_temperature_ptr + state, mask=mask, other=0.0) == 0.0
    tl.store(owners_ptr + index, tl.where(proposed > 0, slot, num_slots + state), mask=mask)
    # The test reads no distribution at ``num_speculative_tokens``, which is no place of a proposal.
    place_read = tl.where(is_greedy | (place < proposed), place, num_speculative_tokens)
    tl.store(places_ptr + index, place_read, mask=mask)
    # Row n holds the token of place n - 1.
    tl.store(tested_ptr + index, tl.where(place <= proposed, token, -1), mask=mask)

    mask = index < num_owners
    owner = tl.load(state_of_slot_ptr + index, mask=index < num_slots, other=0)
    state = tl.where(index < num_slots, tl.maximum(owner, 0), index - num_slots)
    temperature = tl.load(state_temperature_ptr + state, mask=mask)
    tl.store(temperatures_ptr + index, temperature, mask=mask)
    tl.store(seeds_ptr + index, tl.load(state_seeds_ptr + state, mask=mask), mask=mask)


def count_full_pass(
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
    scheduled: torch.Tensor,  # [batch size], int32, draft tokens that were verified
    states: torch.Tensor,  # [batch size], int
    num_sampled: torch.Tensor,  # [batch size], int
    num_proposed: torch.Tensor,  # [max_num_reqs], int32
) -> None:
    """Count the outcome of level 3, without the padding after a proposal."""
    _count_full_pass_kernel[(len(scheduled),)](
        counters, scheduled, states, num_sampled, num_proposed
    )


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
