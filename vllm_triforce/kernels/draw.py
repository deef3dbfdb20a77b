"""Noise and the exponential race, by which the inner levels draw tokens on the device.

Noise is a function of the request's seed, of where its proposal begins and of the token's index.
Level 3's test, which is vLLM's, draws from generators keyed by the seed itself. Ours is keyed by
the seed and a constant, so the two are independent.

Where a proposal begins is part of the key, because level 3's test discards tokens that were
counted, and the counts decide about later proposals. A token that is drawn again in a later
proposal must be drawn by other noise. A proposal begins where a discarded one began after a
session's turn, or after output that was dropped in flight. The discarded one's counts decide
nothing then: requests with a seed have fixed lengths, and the others come back with a new seed of
vLLM's.

vLLM gives a seed to requests without one, from numpy's generator. Its worker seeds this generator
by the engine's seed and its data-parallel index: replicas draw apart, ranks of one engine alike.
"""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.rows import Rows, load_float, load_seed

_BLOCK = 4096  # tokens of a program
# Any number except zero: it separates our streams from those of vLLM's samplers.
_KEY = tl.constexpr(0x7419F06C3E5A2D)
# Odd, with well mixed bits: 2**64 divided by the golden ratio, and a factor of splitmix64, both as
# signed integers.
_STEP = tl.constexpr(-7046029254386353131)
_BEGIN_STEP = tl.constexpr(-4658895280553007687)
DRAFT = tl.constexpr(0)
RECOVER = tl.constexpr(1)
ACCEPT = tl.constexpr(2)
SYNTHETIC = tl.constexpr(3)  # level 3's test at given rates


@dataclass
class Distributions:
    """Distributions over the vocabulary, as logits before the temperature and their logsumexp."""

    logits: torch.Tensor  # [num_rows, num_places, vocab_size], masked by top-k, top-p and min-p
    lse: torch.Tensor  # [num_rows, num_places], float32, logsumexp of logits / temperature


@dataclass
class LevelLogits:
    """Logits of a level: of level 2's ``gamma + 1`` places, or of the place at which level 1 draws.

    Level 1's have no dimension of places.
    """

    best: torch.Tensor  # [num_rows, num_places], int64, argmax
    top: torch.Tensor  # [num_rows, num_places], the largest logit; NaN where any logit is NaN
    distributions: Distributions | None  # None where all rows are greedy


class ExponentialSampler:
    """Scratch memory of the exponential race over the vocabulary.

    Args:
        max_rows: rows of a draw at most.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        self.num_blocks = triton.cdiv(vocab_size, self.block)
        self.padded_blocks = triton.next_power_of_2(self.num_blocks)
        shape = (max_rows, self.num_blocks)
        self.values = torch.zeros(shape, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)

    def race(
        self, rows: Rows, target: Distributions, draft: Distributions | None, **arguments
    ) -> None:
        """Run the race of each row; without ``draft`` drafts are one-hot, or there are none."""
        other = target if draft is None else draft
        _race_kernel[(rows.num_rows, self.num_blocks)](
            target.logits,
            target.lse,
            other.logits,
            other.lse,
            rows.table,
            self.values,
            self.tokens,
            vocab_size=target.logits.shape[-1],
            IS_ONE_HOT=draft is None,
            BLOCK=self.block,
            **arguments,
        )


def draw_drafts(
    rows: Rows,  # column ``step`` of ``rows.drafted`` is written
    step: int,
    draft: LevelLogits,  # level 1's, of one place
    sampler: ExponentialSampler,
) -> None:
    """Draw one token of level 1 for each row."""
    distributions = draft.distributions
    if distributions is not None:
        sampler.race(rows, distributions, None, first_place=step, PLACES=1, PURPOSE=DRAFT)
    _store_drafts_kernel[(rows.num_rows,)](
        rows.table,
        sampler.values,
        sampler.tokens,
        draft.best,
        draft.top,
        sampler.num_blocks,
        step,
        ALL_GREEDY=distributions is None,
        PADDED_BLOCKS=sampler.padded_blocks,
    )


@triton.jit(do_not_specialize=["step"])
def _store_drafts_kernel(
    table_ptr,  # a draft is written, and a NaN is noted
    values_ptr,
    tokens_ptr,
    best_ptr,  # [num_rows]
    top_ptr,  # [num_rows]
    num_blocks,
    step,
    ALL_GREEDY: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    token = tl.load(best_ptr + row).to(tl.int32)
    if not ALL_GREEDY:  # noqa: SIM102, known when the kernel is compiled, the other is not
        if load_float(row_ptr + col.TEMPERATURE) > 0:
            token = sampled_token(values_ptr, tokens_ptr, row, num_blocks, token, PADDED_BLOCKS)
    top = tl.load(top_ptr + row)
    if top != top:
        tl.store(row_ptr + col.HAS_NAN, 1)
    tl.store(row_ptr + col.DRAFTED + step, token)


@triton.jit(do_not_specialize=["first_place"])
def _race_kernel(
    target_ptr,  # [num_rows, PLACES, vocab_size]
    target_lse_ptr,  # [num_rows, PLACES]
    draft_ptr,  # [num_rows, PLACES - 1, vocab_size]
    draft_lse_ptr,  # [num_rows, PLACES - 1]
    table_ptr,
    values_ptr,  # [num_rows, num_blocks], written
    tokens_ptr,  # [num_rows, num_blocks], written
    first_place,  # of the places, after the proposal
    vocab_size,
    PLACES: tl.constexpr,
    PURPOSE: tl.constexpr,
    IS_ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run the exponential race over a block of the vocabulary: argmax of probability over noise.

    Where a draft was rejected the probabilities are those of the residual distribution.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    temperature = load_float(row_ptr + col.TEMPERATURE)
    if temperature == 0.0:
        return
    place = 0
    if PLACES > 1:
        place = tl.load(row_ptr + col.NUM_ACCEPTED)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    target_row = row * PLACES + place
    logits = tl.load(target_ptr + target_row * vocab_size + tokens, mask=mask, other=float("-inf"))
    lse = tl.load(target_lse_ptr + target_row)
    probs = tl.exp(logits.to(tl.float32) / temperature - lse)
    begin, token_position = place_of_noise(row_ptr, first_place + place)
    delay = exponential(load_seed(row_ptr), begin, token_position, PURPOSE, tokens)
    if PLACES > 1:  # noqa: SIM102, known when the kernel is compiled, the other is not
        if place < tl.load(row_ptr + col.NUM_DRAFTED):
            draft_row = row * (PLACES - 1) + place
            if IS_ONE_HOT:
                probs = tl.where(tokens == tl.load(row_ptr + col.DRAFTED + place), 0.0, probs)
            else:
                drafted = tl.load(
                    draft_ptr + draft_row * vocab_size + tokens, mask=mask, other=float("-inf")
                )
                drafted = drafted.to(tl.float32) / temperature
                drafted = tl.exp(drafted - tl.load(draft_lse_ptr + draft_row))
                # A draft whose probability is NaN is always rejected: all of the target's is left.
                probs -= tl.where(drafted == drafted, drafted, 0.0)
    out = row * num_blocks + block
    # Comparisons are false for NaN, which therefore never wins.
    value = tl.where(probs > 0, probs, 0.0) / delay
    tl.store(values_ptr + out, tl.max(value, axis=0))
    tl.store(tokens_ptr + out, block * BLOCK + tl.argmax(value, axis=0))


@triton.jit
def sampled_token(values_ptr, tokens_ptr, row, num_blocks, default, PADDED_BLOCKS: tl.constexpr):
    """Return the token that won a row's race; ``default`` where no token has a probability."""
    blocks = tl.arange(0, PADDED_BLOCKS)
    values = tl.load(values_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-1.0)
    token = tl.load(tokens_ptr + row * num_blocks + tl.argmax(values, axis=0))
    return tl.where(tl.max(values, axis=0) > 0, token, default)


@triton.jit
def place_of_noise(row_ptr, place):
    """Return where a row's proposal began, and the index of the token at ``place`` after it."""
    begin = tl.load(row_ptr + col.COMPUTED)
    return begin, begin + tl.load(row_ptr + col.LENGTH) + 1 + place


@triton.jit
def uniform(seed, begin, token_position, purpose: tl.constexpr):
    """Draw a number from (0, 1).

    Args:
        begin: computed tokens of the request when the proposal began.
    """
    return open_unit(tl.randint(_stream(seed, begin, token_position, purpose), token_position))


@triton.jit
def exponential(seed, begin, token_position, purpose: tl.constexpr, offsets):
    """Draw an exponential number for each of ``offsets``, below 2**31; ``begin`` as above."""
    return delay_of(open_unit(tl.randint(_stream(seed, begin, token_position, purpose), offsets)))


@triton.jit
def open_unit(random32):
    """Convert 32 random bits n to (n + 0.5) / 2**32, rounded to float32 but not to 1.

    Numbers close to 0 keep all bits. The 16-bit halves convert exactly on any GPU.
    """
    tl.static_assert(random32.dtype == tl.uint32)  # or shifts would extend the sign
    high = (random32 >> 16).to(tl.int32).to(tl.float32)
    low = (random32 & 0xFFFF).to(tl.int32).to(tl.float32)
    unit = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    return tl.minimum(unit, 0.99999994)


@triton.jit
def delay_of(unit):
    """Return -log(1 - unit), so that small delays, which win races, come from small ``unit``, where
    float32 is finest.

    Below a quarter it is computed by its series, with a relative error below 3e-6.
    """
    series = 1.0 / 8.0
    for n in tl.static_range(7):
        series = series * unit + 1.0 / (7 - n)
    return tl.where(unit < 0.25, unit * series, -tl.log(1.0 - unit))


@triton.jit
def _stream(seed, begin, token_position, purpose: tl.constexpr):
    """Return the Philox key of one proposal, position and purpose."""
    offset = (token_position.to(tl.int64) * 4 + purpose) * _STEP
    return seed ^ (_KEY + offset + begin.to(tl.int64) * _BEGIN_STEP)
