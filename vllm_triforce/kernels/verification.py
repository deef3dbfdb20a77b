"""Level 2's test of what level 1 drafted, without a word to the host.

The rule is ``runner_v1/verification.py``'s: accept with probability min(1, p2/p1), recover from
norm(max(p2 - p1, 0)), or add the bonus token. Distributions come as logits that are already
masked by the request's top-k, top-p and min-p, and as the logarithms of their sums.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import noise as _noise
from vllm_triforce.kernels.counters import (
    NUM_INNER_ROUNDS,
    NUM_LEVEL1_ACCEPTED,
    NUM_LEVEL1_DRAFTED,
    NUM_NAN_REQUESTS,
)
from vllm_triforce.kernels.distributions import Distributions, DrawParameters, LevelLogits
from vllm_triforce.kernels.draw import ExponentialSampler, draw_kernel, winner
from vllm_triforce.kernels.noise import uniform
from vllm_triforce.kernels.row_table import (
    LEVEL1_ACCEPTED,
    LEVEL1_REJECTED,
    NUM_OUTCOMES,
    NUM_ROUNDS,
    SLOT,
    row_value,
)
from vllm_triforce.kernels.rows import Rows

_RECOVER, _ACCEPT = _noise.RECOVER, _noise.ACCEPT


@triton.jit
def _accept_kernel(
    num_accepted_ptr,  # [num_reqs], written
    drafted_ptr,  # [num_reqs, GAMMA]
    num_drafted_ptr,  # [num_reqs]
    best_ptr,  # [num_reqs, GAMMA + 1]
    top_ptr,  # [num_reqs, GAMMA + 1]
    target_ptr,  # [num_reqs, GAMMA + 1, vocab_size]
    target_lse_ptr,  # [num_reqs, GAMMA + 1]
    draft_ptr,  # [num_reqs, GAMMA, vocab_size]
    draft_lse_ptr,  # [num_reqs, GAMMA]
    temperature_ptr,  # [num_reqs]
    seeds_ptr,  # [num_reqs]
    begins_ptr,  # [num_reqs]
    token_positions_ptr,  # [num_reqs]
    vocab_size,
    GAMMA: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    CERTAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_drafted = tl.load(num_drafted_ptr + row)
    accepted = 0
    going = True
    for place in tl.static_range(GAMMA):
        token = tl.load(drafted_ptr + row * GAMMA + place).to(tl.int64)
        top = tl.load(top_ptr + row * (GAMMA + 1) + place)
        accept = (token == tl.load(best_ptr + row * (GAMMA + 1) + place)) & (top == top)
        if not ALL_GREEDY:
            temperature = tl.load(temperature_ptr + row)
            if temperature > 0:
                at = row * (GAMMA + 1) + place
                target = tl.load(target_ptr + at * vocab_size + token).to(tl.float32)
                target = tl.exp(target / temperature - tl.load(target_lse_ptr + at))
                drafted = 1.0
                if not CERTAIN:
                    at = row * GAMMA + place
                    drafted = tl.load(draft_ptr + at * vocab_size + token).to(tl.float32)
                    drafted = tl.exp(drafted / temperature - tl.load(draft_lse_ptr + at))
                token_position = tl.load(token_positions_ptr + row) + place
                seed, begin = tl.load(seeds_ptr + row), tl.load(begins_ptr + row)
                chance = uniform(seed, begin, token_position, _ACCEPT)
                accept = chance * drafted < target
        going = going & accept & (place < num_drafted)
        accepted += going.to(tl.int32)
    tl.store(num_accepted_ptr + row, accepted)


@triton.jit
def _emit_kernel(
    proposal_ptr,  # [num_reqs, num_speculative_tokens], written
    length_ptr,  # [num_reqs], written
    room_ptr,  # [num_reqs], written
    rounds_left_ptr,  # [num_reqs], written
    num_emitted_ptr,  # [num_reqs], written
    outcomes_ptr,  # [num_reqs, NUM_OUTCOMES], added to
    counters_ptr,  # [num_counters], added to
    row_fault_ptr,  # [num_reqs], written
    slot_fault_ptr,  # [num_slots], written
    row_metadata_ptr,  # [num_reqs, NUM_COLUMNS]
    drafted_ptr,  # [num_reqs, GAMMA]
    num_drafted_ptr,  # [num_reqs]
    num_accepted_ptr,  # [num_reqs]
    best_ptr,  # [num_reqs, GAMMA + 1]
    top_ptr,  # [num_reqs, GAMMA + 1]
    target_lse_ptr,  # [num_reqs, GAMMA + 1]
    temperature_ptr,  # [num_reqs]
    values_ptr,
    tokens_ptr,
    num_blocks,
    num_speculative_tokens,
    GAMMA: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + row)
    room = tl.load(room_ptr + row)
    tl.store(num_emitted_ptr + row, 0)
    if length < room:
        accepted = tl.load(num_accepted_ptr + row)
        num_drafted = tl.load(num_drafted_ptr + row)
        at = row * (GAMMA + 1)
        last = tl.load(best_ptr + at + accepted).to(tl.int32)
        is_number = True
        # Level 1's was found before. Of level 2 every place counts: its keys are in the cache.
        has_fault = tl.load(row_fault_ptr + row) != 0
        for place in tl.static_range(GAMMA + 1):
            top = tl.load(top_ptr + at + place)
            is_right = top == top
            if not ALL_GREEDY:  # noqa: SIM102, known when the kernel is compiled
                if tl.load(temperature_ptr + row) > 0:
                    lse = tl.load(target_lse_ptr + at + place)
                    is_right = (lse == lse) & (tl.abs(lse) < float("inf"))
            is_number = is_number & (is_right | (place != accepted))
            has_fault = has_fault | ((place <= num_drafted) & (is_right == 0))
        if not ALL_GREEDY:  # noqa: SIM102
            if tl.load(temperature_ptr + row) > 0:
                last = winner(values_ptr, tokens_ptr, row, num_blocks, PADDED_BLOCKS)
        out = proposal_ptr + row * num_speculative_tokens + length
        for place in tl.static_range(GAMMA):
            token = tl.load(drafted_ptr + row * GAMMA + place).to(tl.int64)
            tl.store(out + place, token, mask=place < accepted)
        emitted = accepted
        if is_number:
            tl.store(out + accepted, last.to(tl.int64))
            emitted += 1
        rounds_left = tl.load(rounds_left_ptr + row) - 1
        tl.store(rounds_left_ptr + row, rounds_left)
        if (rounds_left == 0) | has_fault:
            tl.store(room_ptr + row, length + emitted)  # the proposal ends with what there is
        if has_fault:
            # The request is not speculated on again.
            tl.store(row_fault_ptr + row, 1)
            tl.store(slot_fault_ptr + row_value(row_metadata_ptr, row, SLOT), 1)
            tl.atomic_add(counters_ptr + NUM_NAN_REQUESTS, 1)
        tl.store(length_ptr + row, length + emitted)
        tl.store(num_emitted_ptr + row, emitted)
        outcomes = outcomes_ptr + row * NUM_OUTCOMES
        tl.store(outcomes + NUM_ROUNDS, tl.load(outcomes + NUM_ROUNDS) + 1)
        right = outcomes + LEVEL1_ACCEPTED
        tl.store(right, tl.load(right) + accepted)
        wrong = outcomes + LEVEL1_REJECTED
        tl.store(wrong, tl.load(wrong) + (accepted < num_drafted).to(tl.int32))
        tl.atomic_add(counters_ptr + NUM_INNER_ROUNDS, 1)
        tl.atomic_add(counters_ptr + NUM_LEVEL1_DRAFTED, num_drafted.to(tl.int64))
        tl.atomic_add(counters_ptr + NUM_LEVEL1_ACCEPTED, accepted.to(tl.int64))


def verify_drafts(
    rows: Rows,  # what was drafted; the proposals are extended
    target: LevelLogits,  # level 2's, of gamma + 1 places
    draft: Distributions | None,  # level 1's, of gamma places; None: each token was certain
    sampling: DrawParameters,
    race: ExponentialSampler,
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Accepts a prefix of each row's drafts, adds one token, and extends the proposal."""
    num_rows, gamma = rows.num_rows, rows.gamma
    all_greedy = target.distributions is None
    # Of greedy rows no distribution is read, of certain tokens no draft's: anything stands there.
    own = target.distributions or Distributions(target.best, target.best)
    if all_greedy or draft is None:
        certain, draft = True, own
    else:
        certain = False
    vocab_size = 0 if all_greedy else own.logits.shape[-1]
    _accept_kernel[(num_rows,)](
        rows.num_accepted,
        rows.drafted,
        rows.num_drafted,
        target.best,
        target.top,
        own.logits,
        own.lse,
        draft.logits,
        draft.lse,
        sampling.temperature,
        sampling.seeds,
        sampling.begins,
        rows.token_positions,
        vocab_size,
        GAMMA=gamma,
        ALL_GREEDY=all_greedy,
        CERTAIN=certain,
    )
    if not all_greedy:
        draw_kernel[(num_rows, race.num_blocks)](
            own.logits,
            own.lse,
            draft.logits,
            draft.lse,
            rows.drafted,
            rows.num_drafted,
            rows.num_accepted,
            sampling.temperature,
            sampling.seeds,
            sampling.begins,
            rows.token_positions,
            race.values,
            race.tokens,
            vocab_size,
            PLACES=gamma + 1,
            PURPOSE=_RECOVER,
            CERTAIN=certain,
            BLOCK=race.block,
        )
    _emit_kernel[(num_rows,)](
        rows.proposal,
        rows.length,
        rows.room,
        rows.rounds_left,
        rows.num_emitted,
        rows.outcomes,
        counters,
        rows.faults.row,
        rows.faults.slot,
        rows.row_metadata,
        rows.drafted,
        rows.num_drafted,
        rows.num_accepted,
        target.best,
        target.top,
        own.lse,
        sampling.temperature,
        race.values,
        race.tokens,
        race.num_blocks,
        rows.num_speculative_tokens,
        GAMMA=gamma,
        ALL_GREEDY=all_greedy,
        PADDED_BLOCKS=race.padded_blocks,
    )
