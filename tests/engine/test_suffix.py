"""Promise: suffix decoding drafts from earlier answers, and changes no output."""

from types import SimpleNamespace

import pytest

pytest.importorskip("arctic_inference")

from vllm import SamplingParams

from tests.conftest import triforce
from tests.inside import built
from tests.outputs import assert_same_outputs, greedy, run
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True, detokenize=False)


@pytest.fixture
def llm(engines, pair):
    keys = triforce(draft_sources="suffix", levels="1,3")
    found = engines.get(pair["target"], keys, max_model_len=1024)
    source = source_of(found)
    source.__init__()
    return found


def source_of(llm):
    return built(llm).speculator.level1.sources["suffix"]


def steps(llm, prompt: list[int], salt: str | None = None) -> int:
    """Count the full passes with proposals that a greedy answer takes."""
    request = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    before = counters_of(llm)
    [output] = llm.generate([request], greedy(60), use_tqdm=False)
    counted = counters_of(llm).since(before)
    return len(output.outputs[0].token_ids) - counted.num_level2_accepted


def test_a_repeated_request_takes_fewer_passes(llm, text):
    prompt = text[:500]
    first, again = steps(llm, prompt), steps(llm, prompt)
    assert again < 0.7 * first
    # Of another tenant it finds nothing, and of its own again.
    assert steps(llm, prompt, "b") == first
    assert steps(llm, prompt, "b") == again
    assert set(source_of(llm)._answers) == {"", "b"}


def test_a_batch_answers_as_stock(stock, llm, text):
    """Greedy beside sampled and seeded requests, which repeat what others were answered."""
    prompts = [text[:400], text[:400], text[200:520], text[:400], text[200:520]]
    params = [greedy(40), SAMPLED, greedy(40), SEEDED, SEEDED]
    before = counters_of(llm)
    rounds = [run(llm, prompts, params) for _ in range(2)]
    for outputs in rounds:
        is_greedy = [0, 2]
        found = [outputs[i] for i in is_greedy]
        wanted = run(stock, [prompts[i] for i in is_greedy], [params[i] for i in is_greedy])
        assert_same_outputs(stock, wanted, found)
    # A seeded request samples the same tokens, whatever others were answered.
    for i in (3, 4):
        assert rounds[0][i].outputs[0].token_ids == rounds[1][i].outputs[0].token_ids
    counted = counters_of(llm).since(before)
    assert counted.num_level2_accepted > 40 and counted.num_level3_rejections
    llm.generate([{"prompt_token_ids": text[:9]}], greedy(2), use_tqdm=False)
    assert source_of(llm).num_requests <= 1


def test_a_scheduler_without_salts_shares_nothing(llm, text, monkeypatch):
    from vllm_triforce.runner_v1 import runner

    monkeypatch.setattr(runner, "TENANTS", SimpleNamespace(of=lambda output: None))
    assert steps(llm, text[:500]) == steps(llm, text[:500])
    assert not source_of(llm)._answers
