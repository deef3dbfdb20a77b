"""Randomness of the inner levels on the device: a function of the request's seed and the token's
position.

vLLM's outer test draws from generators keyed by the seed itself. Ours is keyed by the seed and a
constant, so the two are independent. A token's position is its index in the request: the noise of
a position decides nothing about earlier tokens, so it may serve again when the outer test has
discarded what came of it.

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
def uniform(seed, token_position, purpose: tl.constexpr):
    """One number from [0, 1)."""
    return tl.rand(_stream(seed, token_position, purpose), token_position)


@triton.jit
def exponential(seed, token_position, purpose: tl.constexpr, offsets):
    """A positive number for each of ``offsets``, which are below 2**31."""
    stream = _stream(seed, token_position, purpose)
    return -tl.log(tl.maximum(tl.rand(stream, offsets), 1e-10))


@triton.jit
def _stream(seed, token_position, purpose: tl.constexpr):
    """Key of Philox for one position and purpose."""
    return seed ^ (_KEY + (token_position.to(tl.int64) * 4 + purpose) * _STEP)
