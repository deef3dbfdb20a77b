"""Promise: drafts reach the scheduler with the step's output; nobody asks the worker for them."""

import pytest

from tests.conftest import triforce
from tests.engine.test_scheduling import greedy
from tests.outputs import assert_same_outputs, run, speculating

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_nobody_asks_for_drafts(engines, pair, scheduler, text):
    """A message there and back for each step, where the worker is another process. A scheduler that
    is not ours knows of nothing, and asks after every step."""
    stock = engines.get(pair["target"])
    prompts = [text[:500], text[700:1500], text[:40]]
    params = [greedy(30, ignore_eos=True)] * 3
    keys = triforce(retrieval_budget=192, model=pair["draft"])
    chosen = {} if scheduler is None else {"scheduler_cls": scheduler}
    llm = engines.get(pair["target"], keys, max_model_len=2048, **chosen)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    original, asked = executor.take_draft_token_ids, []
    executor.take_draft_token_ids = lambda: asked.append(1) or original()
    try:
        with speculating(llm, rejections=False):
            found = run(llm, prompts, params)
    finally:
        del executor.take_draft_token_ids
    assert_same_outputs(stock, run(stock, prompts, params), found)
    assert bool(asked) is (scheduler is not None)
