"""Proposals on the way to the full pass: direct ones, their commit, and their distributions.

A direct proposal has level 1's tokens alone. Level 3's test, vLLM's rejection sampler of the full
pass, reads the distributions by slot.
"""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import counters as count
from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.draw import Distributions
from vllm_triforce.kernels.rows import Rows, disable_slot, load_float
from vllm_triforce.kernels.synthetic import SyntheticTest

PAD_TOKEN = 0
"""Stands where nothing was proposed; see ``runner_v2/runner.py``."""
_BLOCK = tl.constexpr(4096)
_TEST_BLOCK = tl.constexpr(1024)


class DraftLogits:
    """Distributions of the proposals that level 3's test has yet to read; at first there are none.

    Args:
        logits: [num_slots, num_speculative_tokens, vocab_size], level 2's, by slot.
        synthetic: acceptance at given rates, for benchmarks.
    """

    def __init__(
        self, logits: torch.Tensor, max_num_reqs: int, synthetic: SyntheticTest | None = None
    ) -> None:
        self.logits = logits
        sizes = max_num_reqs, max_num_reqs, len(logits)
        self.index = torch.zeros(sum(sizes), dtype=torch.int32, device=logits.device)
        """The three tables below, one after the other."""
        self.num_proposed, self.slot_of_state, self.state_of_slot = self.index.split(sizes)
        """[max_num_reqs], [max_num_reqs] and [num_slots]; the last is -1 for slots without."""
        self.state_of_slot.fill_(-1)
        self.synthetic = synthetic


def extend_proposals(
    rows: Rows,  # with their drafts; the proposals are extended
    drafted: Distributions | None,  # level 1's, of gamma places; None where they are one-hot
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Append each row's drafts to its proposal, as far as there is room."""
    _extend_kernel[(rows.num_rows,)](
        rows.table,
        rows.gamma,
        counters,
        rows.table if drafted is None else drafted.lse,
        IS_ONE_HOT=drafted is None,
        PADDED_LEN=triton.next_power_of_2(rows.gamma),
    )


@triton.jit
def _extend_kernel(
    table_ptr,  # updated
    gamma,
    counters_ptr,  # [num_counters], added to
    lse_ptr,  # [num_rows, gamma]
    IS_ONE_HOT: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    length = tl.load(row_ptr + col.LENGTH)
    room = tl.load(row_ptr + col.ROOM)
    tl.store(row_ptr + col.NUM_EMITTED, 0)
    if length < room:
        places = tl.arange(0, PADDED_LEN)
        num_drafted = tl.load(row_ptr + col.NUM_DRAFTED)
        num_emitted = tl.minimum(num_drafted, room - length)
        if tl.load(row_ptr + col.HAS_NAN) != 0:
            # Tokens that were drawn before the NaN stay: whether a token is dropped must not
            # depend on the tokens after it. A greedy row has no distributions, and loses nothing.
            first_wrong = 0
            if not IS_ONE_HOT:
                lse = tl.load(lse_ptr + row * gamma + places, mask=places < gamma, other=0.0)
                is_right = (lse == lse) & (tl.abs(lse) < float("inf"))
                first_wrong = tl.min(tl.where(is_right, PADDED_LEN, places), axis=0)
            num_emitted = tl.minimum(num_emitted, first_wrong)
            num_drafted = 0
            disable_slot(table_ptr, row_ptr)
            tl.atomic_add(counters_ptr + count.NUM_NAN_REQUESTS, 1)
        mask = places < num_emitted
        drafts = tl.load(row_ptr + col.DRAFTED + places, mask=mask)
        tl.store(row_ptr + col.PROPOSED + length + places, drafts, mask=mask)
        if num_drafted < gamma:  # the source has no more
            tl.store(row_ptr + col.ROOM, length + num_emitted)
        tl.store(row_ptr + col.LENGTH, length + num_emitted)
        tl.store(row_ptr + col.NUM_EMITTED, num_emitted)


def export_distributions(
    draft_logits: DraftLogits,  # written
    rows: Rows,  # after emission
    logits: torch.Tensor | None,  # [num_rows, num_places, vocab_size], masked; None: all one-hot
) -> None:
    """Copy the logits that the newest tokens were drawn from to the tensor of level 3's test.

    Rows with ``RowColumn.ONE_HOT`` export one-hot distributions. A grammar cuts a proposal at a
    place that depends on its tokens, and one-hot distributions keep the test of the rest exact.
    Without logits nothing was drawn, and all rows are one-hot.
    """
    num_places = rows.gamma if logits is None else logits.shape[1]
    vocab_size = draft_logits.logits.shape[2] if logits is None else logits.shape[2]
    _export_kernel[(rows.num_rows, num_places, triton.cdiv(vocab_size, _BLOCK.value))](
        draft_logits.logits,
        draft_logits.logits.stride(0),
        draft_logits.logits.stride(1),
        rows.table,
        draft_logits.logits if logits is None else logits,
        vocab_size,
        ALL_ONE_HOT=logits is None,
    )


@triton.jit
def _export_kernel(
    draft_logits_ptr,  # [num_slots, num_speculative_tokens, vocab_stride], written
    slot_stride,
    place_stride,
    table_ptr,  # after emission
    logits_ptr,  # [num_rows, places, vocab_size]; not read where ALL_ONE_HOT
    vocab_size,
    ALL_ONE_HOT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    num_emitted = tl.load(row_ptr + col.NUM_EMITTED)
    place = tl.program_id(1)
    if (place >= num_emitted) | (load_float(row_ptr + col.TEMPERATURE) == 0.0):
        return
    slot = tl.load(row_ptr + col.SLOT).to(tl.int64)
    index = tl.load(row_ptr + col.LENGTH) - num_emitted + place
    tokens = tl.program_id(2) * _BLOCK + tl.arange(0, _BLOCK)
    mask = tokens < vocab_size
    proposed_ptr = row_ptr + col.PROPOSED + index
    if ALL_ONE_HOT:
        logits = tl.where(tokens == tl.load(proposed_ptr), 0.0, float("-inf"))
    else:
        source = logits_ptr + (row * tl.num_programs(1) + place) * vocab_size
        logits = tl.load(source + tokens, mask=mask)
        if tl.load(row_ptr + col.ONE_HOT) != 0:
            logits = tl.where(tokens == tl.load(proposed_ptr), 0.0, float("-inf")).to(logits.dtype)
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
    num_speculative_tokens,
    IS_DIRECT: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    length = tl.load(row_ptr + col.LENGTH)
    if length > 0:
        tl.atomic_add(counters_ptr + count.NUM_PROPOSALS, 1)
        tl.atomic_add(counters_ptr + count.NUM_PROPOSED, length.to(tl.int64))
        if IS_DIRECT:
            tl.atomic_add(counters_ptr + count.NUM_DIRECT_PROPOSALS, 1)
    places = tl.arange(0, PADDED_LEN)
    token = tl.load(row_ptr + col.PROPOSED + places, mask=places < length)
    out = draft_tokens_ptr + tl.load(row_ptr + col.BATCH_ROW) * num_speculative_tokens
    tl.store(out + places, token.to(tl.int64), mask=places < length)
    state = tl.load(row_ptr + col.STATE)
    slot = tl.load(row_ptr + col.SLOT)
    tl.store(num_proposed_ptr + state, length)
    tl.store(slot_of_state_ptr + state, slot)
    tl.store(state_of_slot_ptr + slot, state)
    tl.store(outcomes_ptr + row * col.NUM_OUTCOMES + col.NUM_PROPOSED, length)


@dataclass
class Level3TestRows:
    """Arguments of level 3's test, instead of vLLM's."""

    owners: torch.Tensor
    """[num_logits], int32: a slot, or for rows without a proposal ``num_slots`` + state."""
    places: torch.Tensor  # [num_logits], int32
    draft_tokens: torch.Tensor  # [num_logits]; -1 where nothing was proposed
    temperature: torch.Tensor  # [num_slots + max_num_reqs], by owner
    seeds: torch.Tensor  # [num_slots + max_num_reqs], int64, by owner


def level3_test_rows(
    draft_logits: DraftLogits,
    states: torch.Tensor,  # [num_logits], int32, each row's request
    places: torch.Tensor,  # [num_logits], int32, each row's place among the request's rows
    draft_tokens: torch.Tensor,  # [num_logits], input tokens of the full pass
    temperature: torch.Tensor,  # [max_num_reqs], float32, by state
    seeds: torch.Tensor,  # [max_num_reqs], int64, by state
) -> Level3TestRows:
    """Map each row of level 3's test to its distribution; rows without a proposal have none.

    Places without a proposed token are tested as -1. The test rejects this token without reading a
    distribution and draws from the target alone, which is exact.
    """
    num_logits, num_slots = len(states), len(draft_logits.state_of_slot)
    num_owners = num_slots + len(temperature)
    owners_and_places = torch.empty(2, num_logits, dtype=states.dtype, device=states.device)
    rows = Level3TestRows(
        owners_and_places[0],
        owners_and_places[1],
        torch.empty_like(draft_tokens),
        torch.empty(num_owners, dtype=temperature.dtype, device=states.device),
        torch.empty(num_owners, dtype=seeds.dtype, device=states.device),
    )
    _level3_test_kernel[(triton.cdiv(max(num_logits, num_owners), _TEST_BLOCK.value),)](
        owners_and_places,
        rows.draft_tokens,
        rows.temperature,
        rows.seeds,
        states,
        places,
        draft_tokens,
        temperature,
        seeds,
        draft_logits.index,
        num_logits,
        num_owners,
        num_slots,
        draft_logits.logits.shape[1],
    )
    return rows


@triton.jit(do_not_specialize=["num_logits", "num_owners"])
def _level3_test_kernel(
    owners_ptr,  # [2, num_logits], written: owners and places
    tested_ptr,  # [num_logits], written
    temperatures_ptr,  # [num_owners], written
    seeds_ptr,  # [num_owners], written
    states_ptr,  # [num_logits]
    local_places_ptr,  # [num_logits]
    draft_tokens_ptr,  # [num_logits]
    state_temperature_ptr,  # [max_num_reqs]
    state_seeds_ptr,  # [max_num_reqs]
    num_proposed_ptr,  # [max_num_reqs], then slot_of_state and state_of_slot
    num_logits,
    num_owners,
    num_slots,
    num_speculative_tokens,
):
    # Two sampled requests: one of slot 3 with the last token t, for which two tokens of three were
    # proposed, and one of state 7 without a proposal:
    #     place    0   1   2      3      0
    #     token    t   a   b      pad    u
    #     owner    3   3   3      3      num_slots + 7
    #     read     0   1   none   none   none        place whose distribution the test reads
    #     tested   t   a   b      -1     u           a row's token, tested by the row before it
    slot_of_state_ptr = num_proposed_ptr + num_owners - num_slots
    state_of_slot_ptr = slot_of_state_ptr + num_owners - num_slots
    index = tl.program_id(0) * _TEST_BLOCK + tl.arange(0, _TEST_BLOCK)
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
    tl.store(owners_ptr + num_logits + index, place_read, mask=mask)
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
        tl.atomic_add(counters_ptr + count.NUM_LEVEL2_DRAFTED, drafted.to(tl.int64))
        tl.atomic_add(counters_ptr + count.NUM_LEVEL2_ACCEPTED, accepted.to(tl.int64))
        tl.atomic_add(counters_ptr + count.NUM_LEVEL3_REJECTIONS, (accepted < drafted).to(tl.int64))
        tl.atomic_add(counters_ptr + count.NUM_LEVEL3_STEPS, 1)
