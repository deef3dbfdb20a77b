"""Promise: plans are as good as there are, or nearly so where requests of a route make their passes
together, and take what their passes take."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_triforce.controller.planner import Options, StepCosts, plan
from vllm_triforce.controller.routes import HIERARCHICAL

LOOKUP, DRAFT = "prompt_lookup", "draft_model"
ROUTES = [HIERARCHICAL, HIERARCHICAL, DRAFT, DRAFT, LOOKUP]
PLAIN_S, NUM_REQS, NUM_PLANS = 10.0, 3, 200


def step_costs(plain_s: float, speculating_s=0.0, num_plain=0, error=0.0, **model) -> StepCosts:
    model = SimpleNamespace(error=error, **model)
    return StepCosts(model, plain_s, speculating_s, num_plain, 1000.0, np.array(True))


def drawn(draw: random.Random, is_shared: bool) -> tuple[Options, dict[str, float]]:
    """Draw options by levels, draft and prompt lookup for three requests.

    Args:
        is_shared: False if nothing takes a pass that requests make together.

    Returns:
        The options, and the seconds of a pass of each route.
    """
    each = {HIERARCHICAL: draw.uniform(1, 8), DRAFT: draw.uniform(0.2, 3), LOOKUP: 0.0}
    each = each if is_shared else dict.fromkeys(each, 0.0)
    passes = np.array([[1, draw.choice([2, 3]), 2, 4, 0] for _ in range(NUM_REQS)], dtype=float)
    shared = passes * np.array([each[route] for route in ROUTES]) / NUM_REQS

    def by_option(most) -> np.ndarray:
        return np.array([[draw.uniform(0, m) for m in most] for _ in range(NUM_REQS)])

    options = Options(
        lengths=np.array([[3, 6, 2, 4, 2]] * NUM_REQS),
        tokens=by_option((2, 5, 2, 4, 0.5)),
        seconds=by_option([0.6 if is_shared else 12] * len(ROUTES)) + shared,
        is_possible=by_option([1] * len(ROUTES)) < 0.9,
        routes=ROUTES,
        match_classes=[{}] * NUM_REQS,
        num_rounds=passes,
        passes=passes,
        shared_s=shared,
    )
    return options, each


@pytest.mark.parametrize(
    "is_shared, speculating_s, num_plain, max_slowdown",
    [(False, 0.0, 1, 1.0), (False, 3.0, 1, 1.0), (False, 0.0, 1, 0.2), (True, 0.1, 0, 1.0)],
)
def test_plans_are_about_as_good_as_the_best(is_shared, speculating_s, num_plain, max_slowdown):
    """Compare with all plans in which nobody loses more than ``max_slowdown``, pass by pass."""
    draw, shares, num_plans = random.Random(1), [], 0

    def step(columns) -> tuple[float, float]:
        """Return seconds and speed-up of a plan."""
        seconds, gained, passes = PLAIN_S + speculating_s, 1.0, dict.fromkeys(each, 0.0)
        for row, column in enumerate(columns):
            if column >= 0:
                seconds += options.seconds[row, column] - options.shared_s[row, column]
                gained *= 1 + options.tokens[row, column]
                route = options.routes[column]
                passes[route] = max(passes[route], options.passes[row, column])
        seconds += sum(passes[route] * each[route] for route in each)
        if max(columns) < 0:
            seconds = PLAIN_S
        if PLAIN_S / seconds < 1 - max_slowdown:  # the speed of one that decodes plainly
            return seconds, 0.0
        return seconds, gained ** (1 / (len(columns) + num_plain)) * PLAIN_S / seconds

    for _ in range(NUM_PLANS):
        options, each = drawn(draw, is_shared)
        possible = [[-1, *np.flatnonzero(row)] for row in options.is_possible]
        best = max(step(columns)[1] for columns in itertools.product(*possible))
        costs = step_costs(
            PLAIN_S,
            speculating_s,
            num_plain,
            round_seconds=lambda n, context, each=each: each[HIERARCHICAL],
            draft=lambda n, each=each: each[DRAFT],
        )
        found = plan(options, costs, max_slowdown)
        seconds, speedup = step(found.options)
        assert found.seconds == pytest.approx(seconds)
        assert found.speedup == pytest.approx(speedup) and speedup >= 1
        shares.append(speedup / best)
        num_plans += not found.is_plain
    assert min(shares) > (0.97 if max_slowdown == 1 and not is_shared else 0.8)
    assert np.mean(shares) > 0.97, np.mean(shares)
    optimal = sum(share >= 1 - 1e-9 for share in shares)
    assert is_shared or optimal >= (0.96 if max_slowdown == 1 else 0.8) * NUM_PLANS, optimal
    assert is_shared or 0.05 * NUM_PLANS < num_plans < 0.95 * NUM_PLANS, num_plans


def test_a_gain_below_the_margin_is_not_taken():
    """Options of one request, which make no passes."""
    each = [np.array([numbers]) for numbers in ([4, 8, 2], [3.9, 4.1, 1.5], [0.1] * 3)]
    nothing = np.zeros((1, 3))
    options = Options([LOOKUP] * 3, [{}], *each, nothing == 0, nothing, nothing, nothing)
    assert plan(options, step_costs(1.0, error=0.1)).options.tolist() == [1]
    assert plan(options, step_costs(1.0, error=5.0)).is_plain
