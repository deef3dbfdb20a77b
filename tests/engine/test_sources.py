"""Promise: whatever level 1's tokens come from, output is stock vLLM's, on both runners.

A source that is added to ``host/sources`` is tested here without a line.
"""

import pytest

from tests.conftest import triforce
from tests.engine.test_level2 import built
from tests.generation import assert_same_tokens, generate
from tests.models import held_out_tokens
from tests.v2.test_runner_v2 import run_group
from vllm_triforce.config.draft_sources import DEVICE_SOURCES, SOURCES
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine


def keys_of(source: str, pair: dict[str, str]) -> dict:
    keys: dict = {"draft_sources": source, "retrieval_budget": 256}
    return keys | {"model": pair["draft"]} if SOURCES[source].needs_model else keys


@pytest.mark.parametrize("source", SOURCES.names)
def test_greedy_output_is_stocks(engines, pair, source):
    """Requests of unequal length and one that repeats itself, which every source drafts for."""
    llm = engines.get(pair["target"], triforce(**keys_of(source, pair)))
    stock = engines.get(pair["target"])
    assert list(built(llm).speculator.level1.sources) == [source]
    text = held_out_tokens(llm.get_tokenizer(), 3000)
    prompts = [text[i * 200 :][: 40 + 300 * i] for i in range(6)] + [text[:60] * 5]
    before = counters_of(llm)
    for prompt, wanted, found in zip(prompts, generate(stock, prompts), generate(llm, prompts)):
        assert_same_tokens(stock, prompt, wanted, found)
    counted = counters_of(llm).since(before)
    assert counted.num_level1_drafted > 20 and counted.num_level2_accepted > 20


@pytest.mark.parametrize("source", SOURCES.names)
def test_greedy_output_is_stocks_on_the_device(source):
    """Model Runner V2; a process of its own, since Triton's interpreter is chosen at import."""
    if source not in DEVICE_SOURCES:
        pytest.skip(f"V2 drafts on the device, and {source!r} has no side there")
    if source in ("draft_model", "prompt_lookup"):
        pytest.skip("tests/v2 runs it with much else")
    found = run_group("source", source)
    assert found["same"] and found["counters"]["num_level1_drafted"] > 20
