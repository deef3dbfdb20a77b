"""Randomness of the inner levels on the device: a function of the request's seed, of where its
proposal begins and of the token's position.

vLLM's outer test draws from generators keyed by the seed itself. Ours is keyed by the seed and a
constant, so the two are independent. A token's position is its index in the request. What the outer
test discards of a proposal has been counted all the same, and what is counted decides what is
proposed next: a position that is drawn anew, in a later proposal, is drawn by other numbers.

A proposal begins where a discarded one began after a session's turn, or after output that was
dropped in flight. What was learnt from the first decides nothing then: lengths of requests with a
seed are fixed, and the others come back with a new seed of vLLM's.

Requests without a seed of their own are given one by vLLM, from numpy's generator, which its worker
seeds by the engine's seed and its data-parallel index: replicas draw apart, ranks of one engine
alike.
"""

from vllm.triton_utils import tl, triton

# Any number that is not zero: separates our streams from those of vLLM's samplers.
_KEY = tl.constexpr(0x7419F06C3E5A2D)
# Odd, with their bits well mixed (2**64 divided by the golden ratio, and a factor of splitmix64, as
# signed numbers).
_STEP = tl.constexpr(-7046029254386353131)
_BEGIN_STEP = tl.constexpr(-4658895280553007687)
DRAFT = tl.constexpr(0)
RECOVER = tl.constexpr(1)
ACCEPT = tl.constexpr(2)


@triton.jit
def uniform(seed, begin, token_position, purpose: tl.constexpr):
    """One number from (0, 1).

    Args:
        begin: tokens that the request had computed when the proposal began.
    """
    return open_unit(tl.randint(_stream(seed, begin, token_position, purpose), token_position))


@triton.jit
def exponential(seed, begin, token_position, purpose: tl.constexpr, offsets):
    """A positive number for each of ``offsets``, which are below 2**31; ``begin`` as above."""
    return delay_of(open_unit(tl.randint(_stream(seed, begin, token_position, purpose), offsets)))


@triton.jit
def open_unit(random32):
    """From 32 random bits (n + 0.5) / 2**32, rounded to float32 but not to 1. Of the numbers close
    to 0 no bit is lost; halves are exact, whatever a GPU can convert."""
    tl.static_assert(random32.dtype == tl.uint32)  # or shifts would bring the sign
    high = (random32 >> 16).to(tl.int32).to(tl.float32)
    low = (random32 & 0xFFFF).to(tl.int32).to(tl.float32)
    unit = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    return tl.minimum(unit, 0.99999994)


@triton.jit
def delay_of(unit):
    """-log(1 - unit): the small ones, which win races, come from where a float32 is finest. Below a
    quarter by its series, whose rest is less than 3e-6 of it."""
    series = 1.0 / 8.0
    series = series * unit + 1.0 / 7.0
    series = series * unit + 1.0 / 6.0
    series = series * unit + 1.0 / 5.0
    series = series * unit + 1.0 / 4.0
    series = series * unit + 1.0 / 3.0
    series = series * unit + 1.0 / 2.0
    series = series * unit + 1.0
    return tl.where(unit < 0.25, unit * series, -tl.log(1.0 - unit))


@triton.jit
def _stream(seed, begin, token_position, purpose: tl.constexpr):
    """Key of Philox for one proposal, position and purpose."""
    place = (token_position.to(tl.int64) * 4 + purpose) * _STEP
    return seed ^ (_KEY + place + begin.to(tl.int64) * _BEGIN_STEP)
