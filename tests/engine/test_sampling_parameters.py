"""Promise: every request parameter of stock vLLM is answered, and answered alike.

Greedy requests are compared output by output: tokens, text, finish and stop reason, usage and
log-probabilities. Sampled ones have their distribution tested in ``test_sampling.py``.
"""

import random

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import triforce
from tests.models import held_out_tokens
from tests.outputs import assert_same_outputs, run, speculating

pytestmark = pytest.mark.engine

GREEDY = dict(temperature=0, max_tokens=40)
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "self"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def _ranks_without_compiler():
    """vLLM compiles the ranks of log-probabilities, which takes 20 s and changes nothing."""
    from vllm.v1.sample import sampler

    with pytest.MonkeyPatch.context() as patch:
        compiled = sampler.batched_count_greater_than
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        patch.setattr(sampler, "batched_count_greater_than", plain)
        yield


@pytest.fixture(scope="module")
def stock(engines, pair):
    return engines.get(pair["target"])


@pytest.fixture(scope="module")
def llm(engines, pair):
    return engines.get(pair["target"], triforce(model=pair["draft"], retrieval_budget=256))


@pytest.fixture(scope="module")
def prompts(stock):
    text = held_out_tokens(stock.get_tokenizer(), 4000)
    return [text[:700], text[2000:2300]]


@pytest.fixture(scope="module")
def usual(stock, prompts):
    """What stock vLLM says to the first prompt, to be forbidden, biased and stopped at."""
    return run(stock, prompts[:1], [SamplingParams(**GREEDY)])[0].outputs[0]


def structured(**keys) -> dict:
    return dict(structured_outputs=StructuredOutputsParams(**keys))


# Each takes stock's usual completion; see ``usual``.
CASES = {
    "plain": lambda u: {},
    "ignore_eos": lambda u: dict(ignore_eos=True, logit_bias={EOS: 50}),
    "repetition penalty": lambda u: dict(repetition_penalty=1.2),
    "frequency penalty": lambda u: dict(frequency_penalty=0.6),
    "presence penalty": lambda u: dict(presence_penalty=0.9),
    "logit bias": lambda u: dict(logit_bias={u.token_ids[3]: -100, u.token_ids[5]: 3}),
    "bias and penalty": lambda u: dict(logit_bias={u.token_ids[3]: -9}, repetition_penalty=1.3),
    "bad words": lambda u: dict(bad_words=[u.text[8:14], u.text[20:22]]),
    "allowed tokens": lambda u: dict(allowed_token_ids=list(range(200, 700))),
    "stop token": lambda u: dict(stop_token_ids=[u.token_ids[7]]),
    "stop string": lambda u: dict(stop=[u.text[21:27]]),
    "stop string kept": lambda u: dict(stop=[u.text[21:27]], include_stop_str_in_output=True),
    "eos": lambda u: dict(logit_bias={EOS: 14}),
    "min_tokens": lambda u: dict(min_tokens=9, stop_token_ids=[u.token_ids[5]]),
    "logprobs": lambda u: dict(logprobs=5),
    "prompt_logprobs": lambda u: dict(prompt_logprobs=2, logprobs=0),
    "named logprobs": lambda u: dict(logprob_token_ids=list(u.token_ids[:4])),
    "json": lambda u: structured(json=SCHEMA),
    "json and min_tokens": lambda u: structured(json=SCHEMA) | dict(min_tokens=12, logprobs=2),
    "regex": lambda u: structured(regex=r"(self\._[a-z]{1,8} = [0-9]{1,3}\n){2,3}"),
    "choice": lambda u: structured(choice=["return self", "return None"]),
    "max_tokens": lambda u: dict(max_tokens=3),
}
# Too few tokens, or tokens that level 2 did not guess: what is accepted is not looked at.
HARDLY_SPECULATED = {
    "named logprobs",
    "choice",
    "eos",
    "ignore_eos",
    "allowed tokens",
    "max_tokens",
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_alone(stock, llm, prompts, usual, case):
    params = [SamplingParams(**GREEDY | CASES[case](usual))] * len(prompts)
    wanted = run(stock, prompts, params)
    if case in HARDLY_SPECULATED:
        found = run(llm, prompts, params)
    else:
        with speculating(llm, rejections=False):
            found = run(llm, prompts, params)
    assert_same_outputs(stock, wanted, found)
    if "stop" in case:
        assert found[0].outputs[0].finish_reason == "stop"


def test_all_parameters_in_one_batch(stock, llm, prompts, usual):
    """Requests of all kinds, greedy and sampled, side by side in changing company."""
    params = [SamplingParams(**GREEDY | case(usual)) for case in CASES.values()]
    # "named logprobs" beside other log-probabilities: stock vLLM itself gives the others these.
    params = [p for p in params if p.logprobs is None]
    sampled = [
        SamplingParams(temperature=t, max_tokens=m, min_p=p, seed=s, n=n)
        for t, m, p, s, n in [(1.0, 9, 0.1, None, 2), (0.7, 30, 0, 3, 1), (1.5, 20, 0.3, 4, 3)]
    ]
    params = params + sampled
    random.Random(0).shuffle(params)
    asked = [prompts[i % len(prompts)] for i in range(len(params))]
    wanted = run(stock, asked, params)
    with speculating(llm):
        found = run(llm, asked, params)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    identical = assert_same_outputs(stock, [wanted[i] for i in greedy], [found[i] for i in greedy])
    assert identical >= len(greedy) - 1
    for i, p in enumerate(params):
        assert [o.index for o in found[i].outputs] == list(range(p.n))
        assert all(len(o.token_ids) <= p.max_tokens for o in found[i].outputs)


def test_eos_and_min_tokens_inside_a_proposal(stock, llm, prompts):
    """EOS is the best token everywhere: it ends the request right after min_tokens, wherever in
    a proposal that is. vLLM's own speculation masks it in the bonus token for too long."""
    params = [
        SamplingParams(temperature=0, max_tokens=20, logit_bias={EOS: 60}, min_tokens=n)
        for n in range(10)
    ]
    asked = [prompts[1]] * len(params)
    wanted, found = run(stock, asked, params), run(llm, asked, params)
    assert_same_outputs(stock, wanted, found)
    assert [len(o.outputs[0].token_ids) for o in found] == [n + 1 for n in range(10)]


def test_named_logprobs_beside_speculation(stock, llm, prompts, usual):
    """A request that names the tokens whose log-probabilities it wants gets these, though others
    in its batch are speculated on. (Beside it stock vLLM gives nobody else's rightly.)"""
    named = SamplingParams(**GREEDY | dict(logprob_token_ids=list(usual.token_ids[:4])))
    params = [SamplingParams(**GREEDY), named, SamplingParams(**GREEDY), named]
    asked = [prompts[0], prompts[1], prompts[0], prompts[1]]
    wanted = [run(stock, [prompt], [p])[0] for prompt, p in zip(asked, params)]
    with speculating(llm, rejections=False):
        found = run(llm, asked, params)
    assert_same_outputs(stock, wanted, found)


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


def test_refused_as_stock_refuses(stock, llm, prompts):
    """What stock vLLM refuses, we refuse with its words."""
    for bad in (dict(logprobs=21), dict(logit_bias={5000: 1.0}), dict(allowed_token_ids=[9999])):
        messages = []
        for engine in (stock, llm):
            with pytest.raises(VLLMValidationError) as error:
                run(engine, prompts[:1], [SamplingParams(**GREEDY | bad)])
            messages.append(str(error.value))
        assert messages[0] == messages[1]
