"""From the times of single passes to the speed-up at any acceptance.

A step of the engine is a proposal and a full pass. With ``k`` tokens proposed and each accepted
with probability ``a2`` where the full pass gets to test it, a step emits
``1 + a2 + ... + a2^k`` tokens: those accepted before the first rejection, and one of its own.

The proposal is made in rounds. A round that still misses ``m`` tokens drafts ``d = min(gamma,
m - 1)`` of them with level 1, one step each, and passes them through level 2 once; ``j`` are
accepted with probability ``a1^j (1 - a1)`` for ``j < d`` and ``a1^d`` for all, and the round
yields ``j + 1``. ``inner_loop`` sums over all ways to reach ``k``.

    speed-up = tokens a step * stock's step
               / (selection + steps of level 1 + rounds of level 2 + full pass + the rest)
"""

from dataclasses import asdict, dataclass
from functools import cache


@dataclass(frozen=True)
class Costs:
    """Milliseconds, all at one context and batch; ``stock_step`` is a plain decode step."""

    stock_step: float
    selection: float  # a step's share: it is done every ``refresh_interval`` steps
    level1_step: float
    level2_pass: float
    verification: float  # of one round
    full_pass: float  # num_speculative_tokens + 1 tokens, with what vLLM does around it


def tokens_per_step(level2_acceptance: float, num_speculative_tokens: int) -> float:
    """Tokens that a full pass yields, as ``mean_acceptance_length``."""
    return sum(level2_acceptance**n for n in range(num_speculative_tokens + 1))


@cache
def inner_loop(
    level1_acceptance: float, num_speculative_tokens: int, gamma: int
) -> tuple[float, float]:
    """Expected passes of level 2 and steps of level 1 for one proposal."""

    @cache
    def expected(missing: int) -> tuple[float, float]:
        if missing <= 0:
            return 0.0, 0.0
        drafted = min(gamma, missing - 1)
        rounds, steps = 1.0, float(drafted)
        for accepted in range(drafted + 1):
            chance = level1_acceptance**accepted
            if accepted < drafted:
                chance *= 1 - level1_acceptance
            more = expected(missing - accepted - 1)
            rounds += chance * more[0]
            steps += chance * more[1]
        return rounds, steps

    return expected(num_speculative_tokens)


def per_test(share_accepted: float, gamma: int) -> float:
    """The acceptance per test for which this share of ``gamma`` drafted tokens is accepted.

    Tokens behind a rejected one are not tested but count as drafted, so the share is lower.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        share = sum(middle**n for n in range(1, gamma + 1)) / gamma
        low, high = (middle, high) if share < share_accepted else (low, middle)
    return (low + high) / 2


def speedup(
    costs: Costs,
    level2_acceptance: float,
    level1_acceptance: float,
    num_speculative_tokens: int = 6,
    gamma: int = 2,
) -> float:
    """Decode speed against stock vLLM; both acceptances are per test."""
    rounds, steps = inner_loop(level1_acceptance, num_speculative_tokens, gamma)
    step = (
        costs.selection
        + steps * costs.level1_step
        + rounds * (costs.level2_pass + costs.verification)
        + costs.full_pass
    )
    return tokens_per_step(level2_acceptance, num_speculative_tokens) * costs.stock_step / step


def curve(costs: Costs, acceptances: list[float], level1_acceptance: float, **shape) -> dict:
    """Speed-ups by level 2's acceptance, with the costs they come from."""
    return {
        "costs_ms": asdict(costs),
        "level1_acceptance": level1_acceptance,
        "speedup": {str(a): speedup(costs, a, level1_acceptance, **shape) for a in acceptances},
    }
