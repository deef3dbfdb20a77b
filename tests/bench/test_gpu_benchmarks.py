"""Promise: a GPU session checks answers first, and its plan's steps are what the tools take."""

import functools
import re
from types import SimpleNamespace

from _pytest.mark.expression import Expression

from benchmarks.gpu import plan, test_exactness
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.test_exactness import difference
from tests.models import ROOT


def test_the_benchmarks_of_the_plan_are_what_bench_takes(tmp_path):
    """Whole and small, each by bench's own parser; the 100K cell of 8 requests fits an H200."""
    import argparse

    from vllm_triforce_bench.bench import methods, model_facts, settings

    parser, count = argparse.ArgumentParser(), 0
    settings.add_arguments(parser)
    for is_small in (False, True):
        for name, (module, *words) in plan.steps(tmp_path, 122_000, is_small).items():
            if module != "vllm_triforce.cli":
                assert str(tmp_path / f"{name}.json") in words
                continue
            asked = settings.read(parser.parse_args(words[1:]))
            target, _ = model_facts.read_all(asked)
            asked.check_context(target.max_model_len)
            is_synthetic = asked.synthetic_acceptances is not None
            assert is_synthetic == (name != "first-token")
            variants = methods.variants(
                *(asked.methods, asked.budgets, asked.target, asked.draft, asked.method_keys),
                asked.synthetic_acceptances,
            )
            assert all(("synthetic" in v.label) == is_synthetic for v in variants[1:])
            weights = MODELS["llama-3.1-8b"].weight_bytes * 1.5
            if is_synthetic:
                assert weights + model_facts.kv_cache_bytes(asked, "bfloat16", target) < 139 << 30
            count += 1
    assert count == 12


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
    steps += ["vllm_triforce.cli bench"]
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
