"""Promises on pretrained models: SmolLM2-135M-Instruct with its chat template, Gemma 3 270M."""

import importlib
import pydoc_data.topics

import pytest
from vllm import SamplingParams

from tests.conftest import triforce
from tests.models import ROOT
from vllm_triforce.metrics.report import counters_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.usefixtures("ranks_without_compiler"),
]

BUDGET = 256
QUESTIONS = ["What does the with statement do?", "List the comparison operators."]
NUM_TOKENS = 28


@pytest.fixture(
    scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.thorough)]
)
def model(request) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "models"))
        script = importlib.import_module(request.param)
    try:
        folder = script.prepare()
    except RuntimeError as error:
        pytest.skip(str(error))
    return str(folder / "gqa" if request.param == "smollm2" else folder)


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


def answers(llm, chats) -> list:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)
    if llm.get_tokenizer().chat_template is not None:
        outputs = llm.chat(chats, params, use_tqdm=False)
    else:
        texts = ["\n\n".join(message["content"] for message in chat) for chat in chats]
        outputs = llm.generate(texts, params, use_tqdm=False)
    assert min(len(output.prompt_token_ids) for output in outputs) > 2 * BUDGET
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def stock(engines, model, chats):
    llm = engines.get(model, max_model_len=4096, skip_tokenizer_init=False)
    return answers(llm, chats)


def test_greedy_answers_are_stock_vllms(engines, model, chats, stock):
    keys = triforce(retrieval_budget=BUDGET)
    llm = engines.get(model, keys, max_model_len=4096, skip_tokenizer_init=False)
    before = counters_of(llm)
    for _ in range(2):  # the second time from the prefix cache
        for ours, theirs in zip(answers(llm, chats), stock):
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
            assert ours.token_ids == theirs.token_ids
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    counted = counters_of(llm).since(before)
    assert counted.num_level2_drafted > 40
    assert counted.level2_acceptance_per_test > 0.8
