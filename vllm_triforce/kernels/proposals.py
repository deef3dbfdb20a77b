"""Level 2's distributions as vLLM's outer test reads them: by slot, for those who may propose.

Level 1's tokens as a proposal of their own, which goes straight to the full pass.
"""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.counters import NUM_NAN_REQUESTS
from vllm_triforce.kernels.distributions import Distributions
from vllm_triforce.kernels.row_table import ONE_HOT, SLOT, row_value
from vllm_triforce.kernels.rows import Rows

_BLOCK = 4096


@dataclass
class DraftLogits:
    """Proposals that the outer test has yet to read."""

    logits: torch.Tensor
    """[num_slots, num_speculative_tokens, vocab_size], level 2's, by slot."""
    num_proposed: torch.Tensor  # [max_num_reqs], int32, by state
    slot_of_state: torch.Tensor  # [max_num_reqs], int32
    state_of_slot: torch.Tensor  # [num_slots], int32; -1 for none

    @classmethod
    def allocate(cls, logits: torch.Tensor, max_num_reqs: int) -> "DraftLogits":
        """Nobody has a proposal."""
        device = logits.device
        num_proposed, slot_of_state = torch.zeros(2, max_num_reqs, dtype=torch.int32, device=device)
        state_of_slot = torch.full((len(logits),), -1, dtype=torch.int32, device=device)
        return cls(logits, num_proposed, slot_of_state, state_of_slot)


@dataclass
class OuterTestRows:
    """What vLLM's outer test is called with, in the place of its own arguments."""

    owners: torch.Tensor
    """[num_logits], int32: a slot, or for rows without a proposal ``num_slots`` + state."""
    places: torch.Tensor  # [num_logits], int32
    draft_tokens: torch.Tensor  # [num_logits]; -1 where nothing was proposed
    temperature: torch.Tensor  # [num_slots + max_num_reqs], by owner
    seeds: torch.Tensor  # [num_slots + max_num_reqs], int64, by owner


@triton.jit
def _export_kernel(
    draft_logits_ptr,  # [num_slots, num_speculative_tokens, vocab_stride], written
    slot_stride,
    place_stride,
    row_metadata_ptr,  # [num_reqs, NUM_COLUMNS]
    logits_ptr,  # [num_reqs, places, vocab_size]; not read where ALL_CERTAIN
    length_ptr,  # [num_reqs], after emission
    num_emitted_ptr,  # [num_reqs]
    temperature_ptr,  # [num_reqs]
    proposal_ptr,  # [num_reqs, num_speculative_tokens]
    num_speculative_tokens,
    vocab_size,
    ALL_CERTAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    emitted = tl.load(num_emitted_ptr + row)
    place = tl.program_id(1)
    if (place >= emitted) | (tl.load(temperature_ptr + row) == 0.0):
        return
    slot = row_value(row_metadata_ptr, row, SLOT).to(tl.int64)
    to = tl.load(length_ptr + row) - emitted + place
    tokens = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    if ALL_CERTAIN:
        token = tl.load(proposal_ptr + row * num_speculative_tokens + to)
        logits = tl.where(tokens == token, 0.0, float("-inf"))
    else:
        source = logits_ptr + (row * tl.num_programs(1) + place) * vocab_size
        logits = tl.load(source + tokens, mask=mask)
        if row_value(row_metadata_ptr, row, ONE_HOT) != 0:
            token = tl.load(proposal_ptr + row * num_speculative_tokens + to)
            logits = tl.where(tokens == token, 0.0, float("-inf")).to(logits.dtype)
    out = draft_logits_ptr + slot * slot_stride + to * place_stride
    tl.store(out + tokens, logits.to(draft_logits_ptr.dtype.element_ty), mask=mask)


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
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = here < num_logits
    state = tl.load(states_ptr + here, mask=mask, other=0)
    slot = tl.load(slot_of_state_ptr + state, mask=mask, other=0)
    # A slot that has a new owner has the new owner's distributions.
    is_owner = tl.load(state_of_slot_ptr + slot, mask=mask, other=-1) == state
    proposed = tl.where(is_owner, tl.load(num_proposed_ptr + state, mask=mask, other=0), 0)
    place = tl.load(local_places_ptr + here, mask=mask, other=0)
    token = tl.load(draft_tokens_ptr + here, mask=mask, other=0)
    is_greedy = tl.load(state_temperature_ptr + state, mask=mask, other=0.0) == 0.0
    tl.store(owners_ptr + here, tl.where(proposed > 0, slot, num_slots + state), mask=mask)
    # Of a place that is none, the test reads no distribution.
    place_read = tl.where(is_greedy | (place < proposed), place, num_speculative_tokens)
    tl.store(places_ptr + here, place_read, mask=mask)
    # The token of place n - 1 is fed in row n.
    tl.store(tested_ptr + here, tl.where(place <= proposed, token, -1), mask=mask)

    mask = here < num_owners
    own = tl.load(state_of_slot_ptr + here, mask=here < num_slots, other=0)
    state = tl.where(here < num_slots, tl.maximum(own, 0), here - num_slots)
    temperature = tl.load(state_temperature_ptr + state, mask=mask)
    tl.store(temperatures_ptr + here, temperature, mask=mask)
    tl.store(seeds_ptr + here, tl.load(state_seeds_ptr + state, mask=mask), mask=mask)


def export_distributions(
    handed_up: DraftLogits,  # written
    rows: Rows,  # after emission
    logits: torch.Tensor | None,  # [num_rows, num_places, vocab_size], masked; None: see below
) -> None:
    """Copies the logits from which the newest tokens were drawn to where the outer test reads them.

    Where a row is certain (``RowColumn.ONE_HOT``), each token is said to be: a proposal that is
    cut at a place that depends on its tokens, as a grammar does, is tested rightly only so; and
    where there are no logits, none was drawn.
    """
    num_places = rows.gamma if logits is None else logits.shape[1]
    vocab_size = handed_up.logits.shape[2] if logits is None else logits.shape[2]
    _export_kernel[(rows.num_rows, num_places, triton.cdiv(vocab_size, _BLOCK))](
        handed_up.logits,
        handed_up.logits.stride(0),
        handed_up.logits.stride(1),
        rows.row_metadata,
        handed_up.logits if logits is None else logits,
        rows.length,
        rows.num_emitted,
        rows.temperature,
        rows.proposal,
        rows.num_speculative_tokens,
        vocab_size,
        ALL_CERTAIN=logits is None,
        BLOCK=_BLOCK,
    )


def outer_test_rows(
    handed_up: DraftLogits,
    states: torch.Tensor,  # [num_logits], int32, each row's request
    places: torch.Tensor,  # [num_logits], int32, its place among the request's rows
    draft_tokens: torch.Tensor,  # [num_logits], the tokens that were fed
    temperature: torch.Tensor,  # [max_num_reqs], float32, by state
    seeds: torch.Tensor,  # [max_num_reqs], int64, by state
) -> OuterTestRows:
    """Tell the outer test where each row's distribution lies, and which rows have none.

    What was not proposed is tested as -1, a token that is refused before it is looked at: what
    comes in its place is drawn from the target alone, which is exact.
    """
    num_logits, num_slots = len(states), len(handed_up.state_of_slot)
    num_owners = num_slots + len(temperature)
    found = OuterTestRows(
        torch.empty_like(states),
        torch.empty_like(places),
        torch.empty_like(draft_tokens),
        torch.empty(num_owners, dtype=temperature.dtype, device=states.device),
        torch.empty(num_owners, dtype=seeds.dtype, device=states.device),
    )
    _outer_test_kernel[(triton.cdiv(max(num_logits, num_owners), 1024),)](
        found.owners,
        found.places,
        found.draft_tokens,
        found.temperature,
        found.seeds,
        states,
        places,
        draft_tokens,
        temperature,
        seeds,
        handed_up.num_proposed,
        handed_up.slot_of_state,
        handed_up.state_of_slot,
        num_logits,
        num_owners,
        num_slots,
        handed_up.logits.shape[1],
        BLOCK=1024,
    )
    return found


@triton.jit
def _extend_kernel(
    proposal_ptr,  # [num_rows, num_speculative_tokens], written
    length_ptr,  # [num_rows], written
    room_ptr,  # [num_rows], written
    num_emitted_ptr,  # [num_rows], written
    counters_ptr,  # [num_counters], added to
    row_fault_ptr,  # [num_rows]
    slot_fault_ptr,  # [num_slots], written
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    drafted_ptr,  # [num_rows, gamma]
    num_drafted_ptr,  # [num_rows]
    lse_ptr,  # [num_rows, gamma]
    num_speculative_tokens,
    gamma,
    CERTAIN: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + row)
    room = tl.load(room_ptr + row)
    tl.store(num_emitted_ptr + row, 0)
    if length < room:
        places = tl.arange(0, PADDED_LEN)
        drafted = tl.load(num_drafted_ptr + row)
        emitted = tl.minimum(drafted, room - length)
        if tl.load(row_fault_ptr + row) != 0:
            # What was drawn before the NaN stays: whether a token is dropped must not depend on
            # what was drawn behind it. A greedy row has no distributions, and loses nothing.
            first_wrong = 0
            if not CERTAIN:
                lse = tl.load(lse_ptr + row * gamma + places, mask=places < gamma, other=0.0)
                is_right = (lse == lse) & (tl.abs(lse) < float("inf"))
                first_wrong = tl.min(tl.where(is_right, PADDED_LEN, places), axis=0)
            emitted = tl.minimum(emitted, first_wrong)
            drafted = 0
            tl.store(slot_fault_ptr + row_value(row_metadata_ptr, row, SLOT), 1)
            tl.atomic_add(counters_ptr + NUM_NAN_REQUESTS, 1)
        token = tl.load(drafted_ptr + row * gamma + places, mask=places < emitted, other=0)
        out = proposal_ptr + row * num_speculative_tokens + length
        tl.store(out + places, token.to(tl.int64), mask=places < emitted)
        if drafted < gamma:  # there is no more to come
            tl.store(room_ptr + row, length + emitted)
        tl.store(length_ptr + row, length + emitted)
        tl.store(num_emitted_ptr + row, emitted)


def extend_proposals(
    rows: Rows,  # what was drafted; the proposals are extended by it
    drafted: Distributions | None,  # level 1's, of gamma places; None: each token was certain
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Appends each row's drafts to its proposal, as far as there is room."""
    _extend_kernel[(rows.num_rows,)](
        rows.proposal,
        rows.length,
        rows.room,
        rows.num_emitted,
        counters,
        rows.faults.row,
        rows.faults.slot,
        rows.row_metadata,
        rows.drafted,
        rows.num_drafted,
        rows.drafted if drafted is None else drafted.lse,
        rows.num_speculative_tokens,
        rows.gamma,
        CERTAIN=drafted is None,
        PADDED_LEN=triton.next_power_of_2(rows.gamma),
    )
