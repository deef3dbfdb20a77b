"""Promise: whatever ends a request, and wherever in an accepted run, it ends as in stock vLLM.

A telling part of it, on both runners, is the case "several ends in one run" of ``tests/parity``.
"""

import json
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from tests.conftest import triforce
from tests.models import held_out_tokens
from tests.outputs import assert_same_outputs, run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.usefixtures("ranks_without_compiler"),
]

NUM_TOKENS = 60
# A budget that covers the context, so that whole proposals are accepted: runs of 33 tokens.
KEYS = dict(retrieval_budget=4096, num_speculative_tokens=32, gamma=8)
FIGURES = dict(per_request_spec_decode_metrics="detailed")
PLACES = [(a, b) for a in (3, 8, 15, 27) for b in (1, 2, 4)]
VARIANTS = [
    {},
    {"include_stop_str_in_output": True},
    {"logprobs": 2},
    {"n": 2, "temperature": 1.0, "top_k": 1},
]


@pytest.fixture(scope="module")
def stock(engines, pair):
    return engines.get(pair["target"])


@pytest.fixture(scope="module")
def llm(engines, pair):
    return engines.get(pair["target"], triforce(model=pair["draft"], **KEYS), **FIGURES)


@pytest.fixture(scope="module")
def text(stock):
    return held_out_tokens(stock.get_tokenizer(), 3000)


def params_of(asked: dict) -> SamplingParams:
    usual = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    return SamplingParams(**usual | asked)


def num_behind(completion) -> int:
    """Tokens that were accepted behind the end of a completion."""
    figures = completion.spec_decode_metrics
    made = 1 + sum(accepted + 1 for accepted in figures.per_step_accepted)
    return made - len(completion.token_ids)


def compare(stock, llm, prompt: list[int], asked: list[dict]) -> list:
    """Outputs equal stock's, and some requests end inside an accepted run."""
    params = [params_of(own) for own in asked]
    wanted, found = (run(engine, [prompt] * len(params), params) for engine in (stock, llm))
    assert_same_outputs(stock, wanted, found)
    assert any(num_behind(output.outputs[0]) > 0 for output in found)
    return found


@pytest.mark.parametrize("repeats", [False, True], ids=["text", "a text that repeats itself"])
def test_several_ends_in_one_run(stock, llm, text, repeats):
    prompt = (text[40:64] * 30)[:700] if repeats else text[:700]
    ids = list(run(stock, [prompt], [params_of({})])[0].outputs[0].token_ids)
    tokenizer = stock.get_tokenizer()

    def cut(begin: int, end: int) -> str:
        return tokenizer.decode(ids[begin:end])

    asked: list[dict] = []
    for a, b in PLACES:
        asked += [
            {"stop": [cut(a + b, a + b + 2), cut(a, a + 2)]},
            {"stop": [cut(a, a + 2)], "max_tokens": a + b},
            {"stop": [cut(a, a + 3)], "stop_token_ids": [ids[a + b]]},
            {"stop": [cut(a, a + 2)], "min_tokens": a + b - 1},
            {"stop": [cut(a, a + 3)[1:-1]]},
            {"stop": [cut(a, a + 2), cut(a, a + 1)]},
        ]
    asked = [own for own in asked if all(own["stop"])]
    for most, count in ((3, 3), (24, 2), (30, 2)):
        detection = RepetitionDetectionParams(
            max_pattern_size=most, min_pattern_size=1, min_count=count
        )
        asked.append({"repetition_detection": detection})
    compare(stock, llm, prompt, [own | more for own in asked for more in VARIANTS])


def test_several_ends_of_text(engines, pair, stock, text, tmp_path):
    """Which a model's generation_config.json names, with min_tokens before, at and behind them."""
    prompt = text[:700]
    ids = list(run(stock, [prompt], [params_of({})])[0].outputs[0].token_ids)
    ends = list(dict.fromkeys(ids))[-2:]
    for file in Path(pair["target"]).iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *ends]}))
    has_tokenizer = dict(skip_tokenizer_init=False)
    stock = engines.get(str(tmp_path), **has_tokenizer)
    keys = triforce(model=pair["draft"], **KEYS)
    llm = engines.get(str(tmp_path), keys, **has_tokenizer, **FIGURES)
    first, second = (ids.index(end) + 1 for end in ends)
    asked: list[dict] = [
        {"ignore_eos": False, "min_tokens": least, **more}
        for least in sorted({0, first - 1, first, first + 1, second, second + 1, NUM_TOKENS})
        for more in (*VARIANTS, {"repetition_penalty": 1.1}, {"stop_token_ids": [ids[0]]})
    ]
    outputs = compare(stock, llm, prompt, asked)
    # Who may not end with the first goes on another way.
    assert {output.outputs[0].stop_reason for output in outputs} >= {None, ends[0]}
