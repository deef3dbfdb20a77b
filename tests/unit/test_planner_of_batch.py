"""Promise: where requests of a route make their passes together, plans are about as good as there
are, and take what their passes take."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_triforce.controller.options import Options
from vllm_triforce.controller.planner import StepCosts, plan
from vllm_triforce.controller.routes import HIERARCHICAL

LOOKUP, DRAFT = "prompt_lookup", "draft_model"
PLAIN, NUM_REQS = 10.0, 3


def drawn(draw: random.Random) -> tuple[Options, SimpleNamespace]:
    """Draw options by levels, draft and prompt lookup for three requests."""
    routes = [HIERARCHICAL, HIERARCHICAL, DRAFT, DRAFT, LOOKUP]
    each = {HIERARCHICAL: draw.uniform(1, 8), DRAFT: draw.uniform(0.2, 3), LOOKUP: 0.0}
    passes = np.array([[1, draw.choice([2, 3]), 2, 4, 0] for _ in range(NUM_REQS)], dtype=float)
    shared = passes * np.array([each[route] for route in routes]) / NUM_REQS
    own = np.array([[draw.uniform(0, 0.6) for _ in routes] for _ in range(NUM_REQS)])
    tokens = np.array(
        [[draw.uniform(0, most) for most in (2, 5, 2, 4, 0.5)] for _ in range(NUM_REQS)]
    )
    options = Options(
        lengths=np.array([[3, 6, 2, 4, 2]] * NUM_REQS),
        tokens=tokens,
        seconds=own + shared,
        is_possible=np.array([[draw.random() < 0.9 for _ in routes] for _ in range(NUM_REQS)]),
        routes=routes,
        match_classes=[{}] * NUM_REQS,
        passes=passes,
        shared_s=shared,
    )
    model = SimpleNamespace(
        error=0.0,
        round_seconds=lambda n, context: each[HIERARCHICAL],
        draft=lambda n: each[DRAFT],
    )
    return options, model


def step(options: Options, model, columns) -> tuple[float, float]:
    """Return seconds and speed-up of a plan, pass by pass."""
    seconds, gained, passes = PLAIN + 0.1, 1.0, {HIERARCHICAL: 0.0, DRAFT: 0.0, LOOKUP: 0.0}
    for row, column in enumerate(columns):
        if column >= 0:
            seconds += options.seconds[row, column] - options.shared_s[row, column]
            gained *= 1 + options.tokens[row, column]
            route = options.routes[column]
            passes[route] = max(passes[route], options.passes[row, column])
    seconds += passes[HIERARCHICAL] * model.round_seconds(1, 0) + passes[DRAFT] * model.draft(1)
    if max(columns) < 0:
        seconds = PLAIN
    return seconds, gained ** (1 / len(columns)) * PLAIN / seconds


@pytest.mark.parametrize("seed", range(8))
def test_about_as_good_as_the_best_plan(seed):
    """Compare with all plans."""
    draw, shares = random.Random(seed), []
    for _ in range(25):
        options, model = drawn(draw)
        possible = [[-1, *np.flatnonzero(row)] for row in options.is_possible]
        best = max(step(options, model, columns)[1] for columns in itertools.product(*possible))
        found = plan(options, StepCosts(model, PLAIN, 0.1, 0, 1000.0, np.array(True)))
        seconds, speedup = step(options, model, found.options)
        assert found.seconds == pytest.approx(seconds)
        assert found.speedup == pytest.approx(speedup) and speedup >= 1
        shares.append(speedup / best)
    assert min(shares) > 0.8 and np.mean(shares) > 0.97, (min(shares), np.mean(shares))
