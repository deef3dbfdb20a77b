"""Verification of level 1's drafts by level 2, without a wait of the host.

The rule is that of ``runner_v1/verification.py``: accept with probability min(1, p2/p1), recover
from norm(max(p2 - p1, 0)), or add the bonus token. Distributions come as logits that are already
masked by the request's top-k, top-p and min-p, and as the logarithms of their sums.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import counters as count
from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.draw import (
    ACCEPT,
    RECOVER,
    Distributions,
    ExponentialSampler,
    LevelLogits,
    place_of_noise,
    sampled_token,
    uniform,
)
from vllm_triforce.kernels.rows import Rows, disable_slot, load_float, load_seed


def verify_drafts(
    rows: Rows,  # with their drafts; the proposals are extended
    target: LevelLogits,  # level 2's, of gamma + 1 places
    draft: Distributions | None,  # level 1's, of gamma places; None where they are one-hot
    sampler: ExponentialSampler,
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
    synthetic_rate: float | None = None,
) -> None:
    """Accept a prefix of each row's drafts, add one token, and extend the proposal.

    Args:
        synthetic_rate: probability of accepting any draft, for benchmarks; None for the rule above.
    """
    num_rows, gamma = rows.num_rows, rows.gamma
    all_greedy = target.distributions is None
    # Greedy rows read no distribution, and one-hot drafts none of level 1: any tensor will do.
    level2 = target.distributions or Distributions(target.best, target.best)
    is_one_hot = all_greedy or draft is None
    level1 = level2 if all_greedy or draft is None else draft
    vocab_size = 0 if all_greedy else level2.logits.shape[-1]
    _accept_kernel[(num_rows,)](
        rows.table,
        target.best,
        target.top,
        level2.logits,
        level2.lse,
        level1.logits,
        level1.lse,
        vocab_size,
        GAMMA=gamma,
        ALL_GREEDY=all_greedy,
        IS_ONE_HOT=is_one_hot,
        SYNTHETIC_RATE=synthetic_rate,
    )
    if not all_greedy:
        sampler.race(rows, level2, draft, first_place=0, PLACES=gamma + 1, PURPOSE=RECOVER)
    _emit_kernel[(num_rows,)](
        rows.table,
        rows.outcomes,
        counters,
        target.best,
        target.top,
        level2.lse,
        sampler.values,
        sampler.tokens,
        sampler.num_blocks,
        GAMMA=gamma,
        ALL_GREEDY=all_greedy,
        PADDED_BLOCKS=sampler.padded_blocks,
    )


@triton.jit
def _accept_kernel(
    table_ptr,  # NUM_ACCEPTED is written
    best_ptr,  # [num_rows, GAMMA + 1]
    top_ptr,  # [num_rows, GAMMA + 1]
    target_ptr,  # [num_rows, GAMMA + 1, vocab_size]
    target_lse_ptr,  # [num_rows, GAMMA + 1]
    draft_ptr,  # [num_rows, GAMMA, vocab_size]
    draft_lse_ptr,  # [num_rows, GAMMA]
    vocab_size,
    GAMMA: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    IS_ONE_HOT: tl.constexpr,
    SYNTHETIC_RATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    num_drafted = tl.load(row_ptr + col.NUM_DRAFTED)
    num_accepted = 0
    going = True
    for place in tl.static_range(GAMMA):
        token = tl.load(row_ptr + col.DRAFTED + place).to(tl.int64)
        top = tl.load(top_ptr + row * (GAMMA + 1) + place)
        accept = (token == tl.load(best_ptr + row * (GAMMA + 1) + place)) & (top == top)
        if SYNTHETIC_RATE is not None:
            begin, token_position = place_of_noise(row_ptr, place)
            chance = uniform(load_seed(row_ptr), begin, token_position, ACCEPT)
            accept = (chance < SYNTHETIC_RATE) & (top == top)
        elif not ALL_GREEDY:
            temperature = load_float(row_ptr + col.TEMPERATURE)
            if temperature > 0:
                at = row * (GAMMA + 1) + place
                target = tl.load(target_ptr + at * vocab_size + token).to(tl.float32)
                target = tl.exp(target / temperature - tl.load(target_lse_ptr + at))
                drafted = 1.0
                if not IS_ONE_HOT:
                    at = row * GAMMA + place
                    drafted = tl.load(draft_ptr + at * vocab_size + token).to(tl.float32)
                    drafted = tl.exp(drafted / temperature - tl.load(draft_lse_ptr + at))
                begin, token_position = place_of_noise(row_ptr, place)
                chance = uniform(load_seed(row_ptr), begin, token_position, ACCEPT)
                accept = chance * drafted < target
        going = going & accept & (place < num_drafted)
        num_accepted += going.to(tl.int32)
    tl.store(row_ptr + col.NUM_ACCEPTED, num_accepted)


@triton.jit
def _emit_kernel(
    table_ptr,  # updated
    outcomes_ptr,  # [max_rows, NUM_OUTCOMES], added to
    counters_ptr,  # [num_counters], added to
    best_ptr,  # [num_rows, GAMMA + 1]
    top_ptr,  # [num_rows, GAMMA + 1]
    target_lse_ptr,  # [num_rows, GAMMA + 1]
    values_ptr,
    tokens_ptr,
    num_blocks,
    GAMMA: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    # A row's columns after a round with GAMMA 3 that accepted one of two drafts, a and b, and drew
    # c; p and q were proposed before:
    #     drafted    a b -       proposal   p q a c      length 2 -> 4, num_emitted 2
    row = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    length = tl.load(row_ptr + col.LENGTH)
    room = tl.load(row_ptr + col.ROOM)
    tl.store(row_ptr + col.NUM_EMITTED, 0)
    if length < room:
        num_accepted = tl.load(row_ptr + col.NUM_ACCEPTED)
        num_drafted = tl.load(row_ptr + col.NUM_DRAFTED)
        at = row * (GAMMA + 1)
        last = tl.load(best_ptr + at + num_accepted).to(tl.int32)
        is_number = True
        # Level 1's NaN were noted before. Level 2's count at every place that has keys in the
        # cache.
        has_nan = tl.load(row_ptr + col.HAS_NAN) != 0
        for place in tl.static_range(GAMMA + 1):
            top = tl.load(top_ptr + at + place)
            is_right = top == top
            if not ALL_GREEDY:  # noqa: SIM102, known when the kernel is compiled
                if load_float(row_ptr + col.TEMPERATURE) > 0:
                    lse = tl.load(target_lse_ptr + at + place)
                    is_right = (lse == lse) & (tl.abs(lse) < float("inf"))
            is_number = is_number & (is_right | (place != num_accepted))
            has_nan = has_nan | ((place <= num_drafted) & (is_right == 0))
        if not ALL_GREEDY:  # noqa: SIM102
            if load_float(row_ptr + col.TEMPERATURE) > 0:
                # Without a residual both distributions are equal up to rounding, and the draft was
                # rejected by a rounding error.
                draft = tl.load(row_ptr + col.DRAFTED + num_accepted)
                last = sampled_token(values_ptr, tokens_ptr, row, num_blocks, draft, PADDED_BLOCKS)
        drafted = row_ptr + col.DRAFTED
        out = row_ptr + col.PROPOSED + length
        for place in tl.static_range(GAMMA):
            tl.store(out + place, tl.load(drafted + place), mask=place < num_accepted)
        num_emitted = num_accepted
        if is_number:
            tl.store(out + num_accepted, last)
            num_emitted += 1
        rounds_left = tl.load(row_ptr + col.ROUNDS_LEFT) - 1
        tl.store(row_ptr + col.ROUNDS_LEFT, rounds_left)
        if (rounds_left == 0) | has_nan:
            # The proposal ends with the tokens that it has.
            tl.store(row_ptr + col.ROOM, length + num_emitted)
        if has_nan:
            tl.store(row_ptr + col.HAS_NAN, 1)
            disable_slot(table_ptr, row_ptr)
            tl.atomic_add(counters_ptr + count.NUM_NAN_REQUESTS, 1)
        tl.store(row_ptr + col.LENGTH, length + num_emitted)
        tl.store(row_ptr + col.NUM_EMITTED, num_emitted)
        outcomes = outcomes_ptr + row * col.NUM_OUTCOMES
        tl.store(outcomes + col.NUM_ROUNDS, tl.load(outcomes + col.NUM_ROUNDS) + 1)
        right = outcomes + col.LEVEL1_ACCEPTED
        tl.store(right, tl.load(right) + num_accepted)
        wrong = outcomes + col.LEVEL1_REJECTED
        tl.store(wrong, tl.load(wrong) + (num_accepted < num_drafted).to(tl.int32))
        tl.atomic_add(counters_ptr + count.NUM_INNER_ROUNDS, 1)
        tl.atomic_add(counters_ptr + count.NUM_LEVEL1_DRAFTED, num_drafted.to(tl.int64))
        tl.atomic_add(counters_ptr + count.NUM_LEVEL1_ACCEPTED, num_accepted.to(tl.int64))
