"""Promises on a pretrained model, SmolLM2-135M-Instruct, with its tokenizer and chat template."""

import copy
import importlib.util
import pydoc_data.topics

import numpy as np
import pytest
import torch
from scipy import stats

from tests.conftest import triforce
from tests.models import ROOT
from vllm_triforce.metrics.report import counters_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.usefixtures("ranks_without_compiler"),
]

BUDGET = 256
QUESTIONS = [
    "What does the with statement do?",
    "List the comparison operators.",
]
NUM_TOKENS = 28


@pytest.fixture(scope="module")
def model() -> str:
    path = ROOT / "examples" / "models" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
    try:
        return str(smollm2.prepare() / "gqa")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def chats() -> list[list[dict]]:
    """Questions about one long document, which the prefix cache holds after the first."""
    topics = pydoc_data.topics.topics
    document = "\n\n".join(topics[name] for name in ("with", "function", "comparisons"))
    return [
        [
            {"role": "system", "content": f"Answer from this document.\n\n{document[:3600]}"},
            {"role": "user", "content": question},
        ]
        for question in QUESTIONS
    ]


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a statement up in the document.",
        "parameters": {"type": "object", "properties": {"statement": {"type": "string"}}},
    },
}


def answers(llm, chats, tools=None, **params) -> list:
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": 1, **params})
    outputs = llm.chat(chats, params, use_tqdm=False, tools=tools)
    assert min(len(output.prompt_token_ids) for output in outputs) > 2 * BUDGET
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def stock(engines, model, chats):
    llm = engines.get(model, max_model_len=4096, skip_tokenizer_init=False)
    return answers(llm, chats)


@pytest.mark.parametrize("refresh_interval", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_greedy_answers_are_stock_vllms(engines, model, chats, stock, refresh_interval):
    keys = triforce(retrieval_budget=BUDGET, refresh_interval=refresh_interval)
    llm = engines.get(model, keys, max_model_len=4096, skip_tokenizer_init=False)
    before = counters_of(llm)
    for _ in range(2):  # the second time from the prefix cache
        for ours, theirs in zip(answers(llm, chats), stock):
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
            assert ours.token_ids == theirs.token_ids
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    counted = counters_of(llm).since(before)
    assert counted.num_level2_drafted > 40
    assert counted.num_level2_accepted > 0.7 * counted.num_level2_drafted


def test_a_budget_over_the_whole_context_accepts_all(engines, model, chats):
    keys = triforce(retrieval_budget=4096)
    llm = engines.get(model, keys, max_model_len=4096, skip_tokenizer_init=False)
    before = counters_of(llm)
    answers(llm, chats)
    counted = counters_of(llm).since(before)
    assert counted.num_level2_accepted == counted.num_level2_drafted > 25


def test_streamed_pieces_are_stock_vllms_answer(engines, model, chats, stock):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engines.get(
        model, triforce(retrieval_budget=BUDGET), max_model_len=4096, skip_tokenizer_init=False
    )
    chat = llm.get_tokenizer().apply_chat_template(
        chats[0], add_generation_prompt=True, tokenize=False
    )
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, output_kind=RequestOutputKind.DELTA
    )
    llm.llm_engine.add_request("streamed", chat, params)
    pieces = []
    while llm.llm_engine.has_unfinished_requests():
        pieces += [output.outputs[0].text for output in llm.llm_engine.step()]
    assert "".join(pieces) == stock[0].text
    assert 1 < len(pieces) < NUM_TOKENS, "some pieces bring several tokens"


@pytest.mark.thorough
def test_answers_with_tools_are_stock_vllms(engines, model, chats):
    plain = engines.get(model, max_model_len=4096, skip_tokenizer_init=False)
    wanted = answers(plain, chats[:1], [TOOL])
    llm = engines.get(
        model, triforce(retrieval_budget=BUDGET), max_model_len=4096, skip_tokenizer_init=False
    )
    before = counters_of(llm)
    found = answers(llm, chats[:1], [TOOL])
    assert [answer.text for answer in found] == [answer.text for answer in wanted]
    assert counters_of(llm).since(before).num_level2_accepted > 0


@pytest.mark.thorough
def test_samples_have_the_targets_distribution(engines, model):
    """The second and third token of an answer come from proposals. By transformers' probabilities,
    likeliest token first, their places in the cumulative distribution are uniform."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    keys = triforce(retrieval_budget=64, num_speculative_tokens=3, levels="2,3")
    llm = engines.get(model, keys, max_model_len=4096, skip_tokenizer_init=False)
    text = pydoc_data.topics.topics["with"]
    prompt = llm.get_tokenizer()(text)["input_ids"][:400]
    before = counters_of(llm)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt}] * 300,
        SamplingParams(temperature=1, max_tokens=4, ignore_eos=True),
        use_tqdm=False,
    )
    samples = torch.tensor([output.outputs[0].token_ids[:3] for output in outputs])
    counted = counters_of(llm).since(before)
    assert counted.num_level2_accepted > 300 and counted.num_level3_rejections > 20

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draw, places = np.random.default_rng(0), []
    with torch.no_grad():
        cache = target(torch.tensor([prompt])).past_key_values
        for part in samples.split(50):
            repeated = copy.deepcopy(cache)
            repeated.batch_repeat_interleave(len(part))
            logits = target(part[:, :2], past_key_values=repeated).logits
            probs, order = logits.double().softmax(-1).sort(-1, descending=True)
            ends = probs.cumsum(-1)
            ranks = (order == part[:, 1:, None]).long().argmax(-1, keepdim=True)
            end, width = ends.gather(-1, ranks)[..., 0], probs.gather(-1, ranks)[..., 0]
            places.append(end.numpy() - width.numpy() * draw.random(end.shape))
    for column in np.concatenate(places).T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
