"""Promise: compiled engines, which users have by default, answer as stock vLLM's eager one, also
where another setting filled the compile cache.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import triforce
from tests.engine.compiled_case import ENGINE, LENGTHS, answers, prompts
from tests.generation import assert_same_tokens
from tests.models import ROOT, make_llama
from tests.outputs import speculating

pytestmark = pytest.mark.engine


def assert_as_eager(stock, answered: list[list[int]]) -> None:
    for prompt, wanted, found in zip(prompts() * 2, answers(stock), answered):
        assert_same_tokens(stock, prompt, wanted, found)


def test_traced(engines, tmp_path, monkeypatch):
    """Dynamo traces both models once, for passes of any length: its graphs, run by PyTorch."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    target = make_llama(tmp_path / "target", num_layers=1, std=0.11, query_scale=2.5)
    draft = make_llama(tmp_path / "draft", num_layers=1, std=0.11, seed=1)
    llm = engines.get(target, triforce(model=draft, retrieval_budget=256), **ENGINE)
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
    """What ``compiled_case`` saw, with a compile cache in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.compiled_case", json.dumps(keys)],
        cwd=ROOT,
        env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert "RESULTS " in done.stdout, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(done.stdout.split("RESULTS ")[1])
