"""Randomness of the inner levels on the device: a function of the request's seed and the place.

vLLM's outer test draws from generators keyed by the seed itself. Ours is keyed by the seed and a
constant, so the two are independent. A place is the index of the token that is being drawn: the
noise of a place decides nothing about earlier tokens, so it may serve again when the outer test
has discarded what came of it.

Requests without a seed of their own are given one by vLLM, from numpy's generator, which its worker
seeds by the engine's seed and its data-parallel index: replicas draw apart, ranks of one engine
alike.
"""

from vllm.triton_utils import tl, triton

# Any number that is not zero: separates our streams from those of vLLM's samplers.
_KEY = tl.constexpr(0x7419F06C3E5A2D)
# Odd, with its bits well mixed (2**64 divided by the golden ratio, as a signed number).
_STEP = tl.constexpr(-7046029254386353131)
DRAFT = tl.constexpr(0)
RECOVER = tl.constexpr(1)
ACCEPT = tl.constexpr(2)


@triton.jit
def uniform(seed, place, purpose: tl.constexpr):
    """One number from [0, 1)."""
    return tl.rand(_stream(seed, place, purpose), place)


@triton.jit
def exponential(seed, place, purpose: tl.constexpr, offsets):
    """A positive number for each of ``offsets``, which are below 2**31."""
    return -tl.log(tl.maximum(tl.rand(_stream(seed, place, purpose), offsets), 1e-10))


@triton.jit
def _stream(seed, place, purpose: tl.constexpr):
    """Key of Philox for one place and purpose."""
    return seed ^ (_KEY + (place.to(tl.int64) * 4 + purpose) * _STEP)
