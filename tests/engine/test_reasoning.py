"""Promise: reasoning ends where it ends in stock vLLM, whoever else is in the batch.

What both runners promise of it is in ``tests/parity``, small.
"""

import pytest
from vllm import SamplingParams

from tests import reasoning_parser
from tests.generation import generate
from tests.models import held_out_tokens
from tests.outputs import run
from tests.parity import running
from tests.parity.cases import REASONING, REASONING_PLACES, SMALL
from tests.parity.device import Device
from tests.v2.environment import needs_interpreter
from vllm_triforce.metrics.report import counters_of

pytestmark = [pytest.mark.engine, pytest.mark.thorough]

BUDGETS, NUM_TOKENS = range(34), 40
FORCED = dict(reasoning_config=reasoning_parser.forcing("\n    return"))
FIXED = dict(method="triforce", min_context=0, adaptive=False)
SETTINGS = {
    "default": dict(method="triforce"),
    "plain": dict(method="triforce", min_context=4000),
    "lookup": FIXED | dict(retrieval_budget=128),
    "draft": FIXED | dict(retrieval_budget=128, model="draft"),
}


def answers(llm, prompts: list[list[int]], budgets: list[int | None]) -> list[list[int]]:
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            thinking_token_budget=budget,
        )
        for budget in budgets
    ]
    return [list(output.outputs[0].token_ids) for output in run(llm, prompts, params)]


def thinking(stock) -> list[list[int]]:
    """Prompts that end within reasoning, some tokens behind its beginning."""
    text = held_out_tokens(stock.get_tokenizer(), 3000)
    # None has come to its end there, which the runners do not see alike (patches/README.md).
    places = REASONING_PLACES
    return [text[place - 60 - 9 * row : place + 2 + row] for row, place in enumerate(places)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_budget_in_every_row(engines, pair, setting):
    """Beside requests without a budget, in batches of one to four."""
    stock = engines.get(pair["target"], **FORCED)
    keys = dict(SETTINGS[setting])
    if "model" in keys:
        keys["model"] = pair["draft"]
    llm = engines.get(pair["target"], keys, **FORCED)
    prompts = thinking(stock)
    before = counters_of(llm)
    without = generate(stock, prompts, max_tokens=NUM_TOKENS)
    differing = 0
    for budget in BUDGETS:
        alone = [answers(stock, [prompt], [budget])[0] for prompt in prompts]
        differing += sum(found != usual for found, usual in zip(alone, without))
        for size in range(1, 5):
            for row in range(size):
                budgets = [budget if other == row else None for other in range(size)]
                wanted = [*without[:row], alone[row], *without[row + 1 : size]]
                assert answers(llm, prompts[:size], budgets) == wanted, (budget, size, row)
    assert differing > 3 * len(BUDGETS), "or nothing was forced"
    counted = counters_of(llm).since(before)
    if setting in ("lookup", "draft"):
        assert counted.num_level2_accepted > 1000 and counted.num_level3_rejections > 100


@pytest.mark.slow
@needs_interpreter
def test_every_budget_on_runner_v2(engines, pair, tmp_path):
    """Each budget once, in batches of four."""
    stock = engines.get(pair["target"], **REASONING)
    prompts = thinking(stock)
    # Runner V2 alone begins a new budget with a beginning within reasoning, and V1 does not take
    # the parser's end for one.
    bias = {reasoning_parser.START: -100, reasoning_parser.END: -100}
    shared = dict(max_tokens=NUM_TOKENS, logit_bias=bias, detokenize=False)
    rounds = []
    for first in range(0, len(BUDGETS), len(prompts)):
        # No longer than it takes to see how the largest of them ends.
        own = shared | dict(max_tokens=first + 7)
        batch = [budget if budget in BUDGETS else None for budget in range(first, first + 4)]
        asked = zip(prompts, batch)
        rounds.append([(its, own | dict(thinking_token_budget=budget)) for its, budget in asked])
    keys = FIXED | dict(retrieval_budget=128, model=pair["draft"])
    job = running.Job("budgets", pair["target"], keys, SMALL | REASONING, rounds, 0, ())
    device = Device([job], tmp_path)
    try:
        seen = device.outcome(job)
    finally:
        device.close()
    usual = running.generate(stock, [(prompt, shared) for prompt in prompts])
    differing = 0
    for batch, asked in zip(seen.batches, rounds, strict=True):
        for row, (output, request) in enumerate(zip(batch.outputs, asked, strict=True)):
            found, wanted, without = (
                list(its.outputs[0].token_ids)[: request[1]["max_tokens"]]
                for its in (output, running.generate(stock, [request])[0], usual[row])
            )
            assert found == wanted, (request[1], row)
            differing += wanted != without
    assert differing > len(BUDGETS) - 3, "or nothing was forced"
    assert sum(batch.counted.num_level2_accepted for batch in seen.batches) > 200
