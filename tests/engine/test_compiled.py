"""Promise: compiled engines, which users have by default, answer as stock vLLM's eager one."""

import pytest

from tests.conftest import triforce
from tests.engine.compiled_case import ENGINE, answers, prompts
from tests.generation import assert_same_tokens
from tests.models import make_llama
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
