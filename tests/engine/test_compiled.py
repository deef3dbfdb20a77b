"""Promise: compiled engines, which users have by default, answer as stock vLLM's eager one, also
where another setting filled the compile cache.

``python -m tests.engine.test_compiled JOBS`` runs compiled engines one after the other. JOBS is
JSON: a list of TriForce's keys, or null for stock vLLM, an engine each.
"""

import json
import os
import sys
from dataclasses import asdict

import pytest
from vllm.compilation.counter import compilation_counter

from tests.child import results_of, say
from tests.conftest import Engines, triforce
from tests.generation import assert_same_tokens, generate
from tests.models import PAIR, held_out_tokens, make_llama
from tests.outputs import speculating
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine


ENGINE = dict(enforce_eager=False, max_model_len=4096)
LENGTHS = (40, 700, 2000)


def prompts() -> list[list[int]]:
    text = held_out_tokens(6000)
    return [text[n : 2 * n] for n in LENGTHS]


def answers(llm) -> list[list[int]]:
    """Alone and together, greedy and sampled with one answer."""
    sampled = {"temperature": 1.0, "top_k": 1}
    alone = [generate(llm, [prompt], max_tokens=24)[0] for prompt in prompts()]
    return [*alone, *generate(llm, prompts(), max_tokens=24, **sampled)]


def assert_as_eager(stock, answered: list[list[int]]) -> None:
    for prompt, wanted, found in zip(prompts() * 2, answers(stock), answered):
        assert_same_tokens(stock, prompt, wanted, found)


@pytest.mark.slow  # before tests that load modules anew: Dynamo knows its classes by identity
@pytest.mark.parametrize(
    "copy", [None, pytest.param("bfloat16", marks=pytest.mark.thorough)], ids=["target", "copy"]
)
def test_traced(engines, tmp_path, monkeypatch, copy):
    """Dynamo traces both models once, for passes of any length: its graphs, run by PyTorch."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    target = make_llama(tmp_path / "target", num_layers=1, std=0.11, query_scale=2.5)
    draft = make_llama(tmp_path / "draft", num_layers=1, std=0.11, seed=1)
    keys = triforce(model=draft, retrieval_budget=256, level2_model=copy)
    llm = engines.get(target, keys, **ENGINE)
    assert not llm.llm_engine.vllm_config.model_config.enforce_eager
    with speculating(llm):
        answered = answers(llm)
    assert_as_eager(engines.get(target, max_model_len=4096), answered)


@pytest.mark.thorough
def test_compile_cache_between_settings(engines, pair, tmp_path):
    """Each setting compiles for itself: a second process, in the other order and with the first
    one's cache, says the same and accepts as many drafts."""
    other = make_llama(tmp_path / "other", num_layers=1)
    keys = [
        None,
        triforce(model=pair["draft"], retrieval_budget=256, num_speculative_tokens=7),
        triforce(model=pair["draft"], retrieval_budget=256, num_speculative_tokens=11, gamma=4),
        triforce(model=other, retrieval_budget=256, num_speculative_tokens=7),
        triforce(retrieval_budget=256, num_speculative_tokens=7),
        triforce(model=pair["target"], retrieval_budget=256, num_speculative_tokens=7),
    ]
    first = compiled(keys, tmp_path)
    again = compiled(keys[::-1], tmp_path)[::-1]
    for one, two in zip(first, again):
        assert one["compiled"] > 0
        assert one["tokens"] == two["tokens"] and one["counted"] == two["counted"]
    for done, own in zip(first, keys):
        assert_as_eager(engines.get(pair["target"]), done["tokens"])
        assert own is None or done["counted"]["num_level2_accepted"] > len(LENGTHS)


def compiled(keys: list, folder) -> list[dict]:
    """What ``main()`` saw, with a compile cache in ``folder``."""
    env = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache")}
    return results_of("tests.engine.test_compiled", json.dumps(keys), env=env)


def main() -> None:
    """Print what each engine said, as JSON."""
    engines, found = Engines(keep=1), []
    for keys in json.loads(sys.argv[1]):
        before = compilation_counter.clone()
        llm = engines.get(str(PAIR / "target"), keys, **ENGINE)
        answered = answers(llm)
        counted = None if keys is None else counters_of(llm)
        found.append(
            {
                "tokens": answered,
                "compiled": compilation_counter.num_aot_compiles - before.num_aot_compiles,
                "counted": {} if keys is None else asdict(counted) | {"time_seconds": 0},
            }
        )
    say(found)


if __name__ == "__main__":
    main()
