"""Promise: the speed-up at an acceptance follows from the times of the passes, as documented."""

import random

import pytest

from vllm_triforce_bench.gpu_suite.speedup import (
    Costs,
    curve,
    inner_loop,
    per_test,
    speedup,
    tokens_per_step,
)

COSTS = Costs(20.0, 0.5, 0.3, 4.0, 0.1, 24.0)


def simulate(a2: float, a1: float, k: int, gamma: int, costs: Costs, steps: int = 40_000) -> float:
    """The same quantities by playing the algorithm, coin by coin."""
    coin = random.Random(0)
    tokens = milliseconds = 0.0
    for _ in range(steps):
        proposed = 0
        milliseconds += costs.selection + costs.full_pass
        while proposed < k:
            drafted = min(gamma, k - proposed - 1)
            accepted = 0
            while accepted < drafted and coin.random() < a1:
                accepted += 1
            proposed += accepted + 1
            milliseconds += drafted * costs.level1_step + costs.level2_pass + costs.verification
        kept = 0
        while kept < k and coin.random() < a2:
            kept += 1
        tokens += kept + 1
    return tokens * costs.stock_step / milliseconds


@pytest.mark.parametrize("k, gamma", [(6, 2), (1, 3), (5, 1), (8, 4)])
@pytest.mark.parametrize("a2, a1", [(0.92, 0.21), (0.5, 0.9)])
def test_the_formula_is_what_the_algorithm_costs(k, gamma, a2, a1):
    shape = dict(num_speculative_tokens=k, gamma=gamma)
    assert speedup(COSTS, a2, a1, **shape) == pytest.approx(
        simulate(a2, a1, k, gamma, COSTS), rel=0.01
    )


def test_the_ends_are_plain():
    assert tokens_per_step(1.0, 6) == 7 and tokens_per_step(0.0, 6) == 1
    # Nothing drafted is accepted: a round a token, and as many drafts as fit.
    assert inner_loop(0.0, 6, 2) == (6, 2 * 4 + 1)
    # Everything is: three tokens a round.
    assert inner_loop(1.0, 6, 2) == (2, 4)
    free = Costs(10.0, 0.0, 0.0, 0.0, 0.0, 10.0)
    assert speedup(free, 1.0, 0.3) == pytest.approx(7)
    assert set(curve(COSTS, [0.9, 0.92], 0.2)["speedup"]) == {"0.9", "0.92"}


def test_untested_tokens_do_not_count_as_rejected():
    assert per_test((0.6 + 0.36) / 2, gamma=2) == pytest.approx(0.6)
    assert per_test(0.3, gamma=1) == pytest.approx(0.3)
