"""Promise: compiled engines, which users have by default, answer as stock vLLM's eager one."""

import pytest

from tests.conftest import triforce
from tests.generation import assert_same_tokens, generate
from tests.models import make_llama
from tests.outputs import speculating

pytestmark = pytest.mark.engine

LENGTHS = (40, 700, 2000)


def answers(llm, prompts: list[list[int]]) -> list[list[int]]:
    """Alone and together, greedy and sampled with one answer."""
    sampled = {"temperature": 1.0, "top_k": 1}
    alone = [generate(llm, [prompt], max_tokens=24)[0] for prompt in prompts]
    return [*alone, *generate(llm, prompts, max_tokens=24, **sampled)]


@pytest.mark.slow  # before tests that load modules anew: Dynamo knows its classes by identity
@pytest.mark.parametrize(
    "copy, inductor",
    [
        (None, False),
        pytest.param("bfloat16", False, marks=pytest.mark.thorough),
        pytest.param(None, True, marks=pytest.mark.thorough),
    ],
    ids=["target", "copy", "inductor"],
)
def test_traced(engines, text, tmp_path, monkeypatch, copy, inductor):
    """Dynamo traces both models once, for passes of any length: its graphs, run by PyTorch or
    compiled."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", str(int(not inductor)))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    target = make_llama(tmp_path / "target", num_layers=1, std=0.11, query_scale=2.5)
    draft = make_llama(tmp_path / "draft", num_layers=1, std=0.11, seed=1)
    prompts = [text[n : 2 * n] for n in LENGTHS]
    keys = triforce(model=draft, retrieval_budget=256, level2_model=copy)
    llm = engines.get(target, keys, enforce_eager=False, max_model_len=4096)
    assert not llm.llm_engine.vllm_config.model_config.enforce_eager
    with speculating(llm):
        found = answers(llm, prompts)
    stock = engines.get(target, max_model_len=4096)
    for prompt, *tokens in zip(prompts * 2, answers(stock, prompts), found):
        assert_same_tokens(stock, prompt, *tokens)
