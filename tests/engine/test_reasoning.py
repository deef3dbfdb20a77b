"""Promise: reasoning ends where it ends in stock vLLM, whoever else is in the batch.

What both runners promise of it is in ``tests/parity``, small.
"""

import pytest
from vllm import SamplingParams

from tests import reasoning_parser
from tests.generation import generate
from tests.models import held_out_tokens
from tests.outputs import run
from tests.parity.cases import REASONING_PLACES
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
