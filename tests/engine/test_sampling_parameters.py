"""Promise: log-probabilities of sampled tokens are stock vLLM's, and so is what it refuses.

That every other request parameter is answered alike is said in ``tests/parity``.
"""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.fuzz.engines import grammars_by
from tests.inside import scheduler_of
from tests.outputs import assert_same_outputs, run, speculating
from tests.parity.cases import SCHEMA

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ranks_without_compiler")]

GREEDY = dict(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def prompts(stock, text):
    return [text[:700], text[2000:2300]]


def test_sampled_logprobs_are_the_models(stock, llm, prompts):
    """Log-probabilities of sampled tokens equal stock's for the same text, n > 1 and seeded."""
    params = SamplingParams(temperature=0.8, top_k=20, max_tokens=24, logprobs=2, n=2, seed=5)
    with speculating(llm):
        found = run(llm, prompts, [params] * 2)
    again = run(llm, prompts, [params] * 2)
    for a, b, prompt in zip(found, again, prompts):
        assert len({tuple(o.token_ids) for o in a.outputs}) == 2
        for one, same in zip(a.outputs, b.outputs):
            assert list(one.token_ids) == list(same.token_ids)
            scored = run(
                stock,
                [prompt + list(one.token_ids)],
                [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)],
            )[0].prompt_logprobs[len(prompt) :]
            for token, ours, stocks in zip(one.token_ids, one.logprobs, scored):
                assert abs(ours[token].logprob - stocks[token].logprob) < 1e-3


BACKENDS = ("xgrammar", "guidance", "outlines")  # vLLM has a fourth, without speculation
STRUCTURES = (
    dict(json=SCHEMA),
    dict(regex=r"(self\._[a-z]{1,8} = [0-9]{1,3}\n){2,3}"),
    dict(choice=["return self", "return None"]),
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_structured_output_backend(stock, llm, prompts, backend):
    """Tokens and text are stock's by every backend, greedy and sampled with one answer."""

    def params() -> list[SamplingParams]:
        return [
            SamplingParams(
                max_tokens=32, structured_outputs=StructuredOutputsParams(**structure), **own
            )
            for structure in STRUCTURES
            for own in (dict(temperature=0, logprobs=1), dict(temperature=1.0, top_k=1))
        ]

    asked = [prompts[i % 2] for i in range(len(params()))]
    with grammars_by(stock, backend):
        wanted = run(stock, asked, params())
    with grammars_by(llm, backend), speculating(llm, rejections=False):
        found = run(llm, asked, params())
        used = type(scheduler_of(llm).structured_output_manager.backend).__name__
    assert backend in used.lower()
    assert assert_same_outputs(stock, wanted, found) == len(asked)
