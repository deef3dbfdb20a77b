"""Promise: a GPU session checks answers first; its speed-ups follow from the times of passes."""

import functools
import random
import re
from types import SimpleNamespace

import pytest
from _pytest.mark.expression import Expression

from benchmarks.gpu import test_exactness
from benchmarks.gpu.speedup import Costs, costs_of, speedup, table
from benchmarks.gpu.test_exactness import difference
from tests.models import ROOT

COSTS = Costs(20.0, 0.5, 0.3, 4.0, 0.1, 24.0)


def simulate(a2: float, a1: float, k: int, gamma: int, steps: int = 40_000) -> float:
    """The same quantities by playing the algorithm, coin by coin."""
    coin = random.Random(0)
    tokens = milliseconds = 0.0
    for _ in range(steps):
        proposed = 0
        milliseconds += COSTS.selection + COSTS.full_pass
        while proposed < k:
            drafted = min(gamma, k - proposed - 1)
            accepted = 0
            while accepted < drafted and coin.random() < a1:
                accepted += 1
            proposed += accepted + 1
            milliseconds += drafted * COSTS.level1_step + COSTS.level2_pass + COSTS.verification
        kept = 0
        while kept < k and coin.random() < a2:
            kept += 1
        tokens += kept + 1
    return tokens * COSTS.stock_step / milliseconds


@pytest.mark.parametrize("k, gamma", [(6, 2), (1, 3), (8, 4)])
@pytest.mark.parametrize("a2, a1", [(0.92, 0.21), (0.5, 0.9)])
def test_the_formula_is_what_the_algorithm_costs(k, gamma, a2, a1):
    assert speedup(COSTS, a2, a1, k, gamma) == pytest.approx(simulate(a2, a1, k, gamma), rel=0.01)


def test_costs_are_those_of_the_measurements():
    stock = [{"num_steps": 10, "seconds": 0.2}]
    spent = {"selection": 0.01, "level 1": 0.04, "level 2": 0.1, "verification": 0.02}
    parts = {"num_steps": 10, "seconds": 0.4, "num_level2_passes": 20, "time_seconds": spent}
    ours = [{"num_steps": 9, "seconds": 0.3, "parts": parts}]
    costs = costs_of(stock, ours)
    assert costs == Costs(*map(pytest.approx, (20.0, 1.0, 1.0, 5.0, 1.0, 40 - 17)))
    cell = {"context": 8000, "batch_size": 1}
    records = [{**cell, "method": "stock", **stock[0]}]
    records += [{**cell, "method": "triforce:all", **ours[0]}]
    assert f"{speedup(costs, 0.9, 0.21, 6, 2):.2f}" in table(records).splitlines()[-1]


def test_tokens_may_part_only_where_both_are_near_stocks_best():
    best = [{1: -0.1, 2: -3.0}, {5: -0.7, 6: -0.8, 7: -0.8}, {3: -0.1, 4: -3.0}]
    logprobs = [
        {token: SimpleNamespace(logprob=value) for token, value in each.items()} for each in best
    ]
    stock = SimpleNamespace(token_ids=[1, 5, 3], logprobs=logprobs)
    assert difference(stock, [1, 5, 3], 0.125) is None
    assert difference(stock, [1, 6, 9], 0.125) is None, "later tokens answer another text"
    assert difference(stock, [1, 7, 3], 0.125) is None, "three are near"
    assert "token 0" in difference(stock, [2, 5, 3], 0.125), "far apart"
    assert "token 1" in difference(stock, [1, 9, 3], 0.125), "not among the best"
    assert "2 tokens" in difference(stock, [1, 5], 0.125)


def test_correctness_comes_first_and_every_case_is_run():
    """Each case of test_exactness.py is chosen by one ``-k`` expression of the session."""
    script = (ROOT / "benchmarks" / "gpu" / "session.sh").read_text()
    steps = ["test_one_prompt", "tests/kernels", "tests.emulated_gpu", "FLASH_ATTN", "-k offload"]
    steps += ["vllm_triforce.cli bench", "benchmarks.gpu.speedup"]
    places = [script.index(step) for step in steps]
    assert places == sorted(places)
    (backends,) = re.findall(r"for backend in ([A-Z_ ]+); do", script)
    chosen = []
    for expression in re.findall(r"-k '?([^'\"]+)", script):
        each = backends.split() if "$backend" in expression else [""]
        chosen += [Expression.compile(expression.replace("$backend", name)) for name in each]
    tests = ("test_greedy_outputs_are_stocks", "test_samples_follow_the_targets_distribution")
    assert all(hasattr(test_exactness, name) for name in tests)
    ids = [f"{tests[0]}[{case.id}]" for case in test_exactness.CASES]
    ids += [f"{tests[1]}[{where}-T1]" for where in (*test_exactness.BACKENDS, "FLASH-offload")]
    for name in ids:
        words = functools.partial(lambda name, word, **_: word in name, name)
        assert sum(one.evaluate(words) for one in chosen) == 1, name
