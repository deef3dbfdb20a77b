"""Promise: whatever the scheduler does to a request, it answers as stock vLLM does.

One engine with a KV cache too small for the load, prefix caching, chunked prefill and a context
gate in the middle of the lengths.
"""

import random

import pytest

from tests.conftest import triforce
from tests.inside import built, controller_of, drive, scheduler_of, worker_of
from tests.outputs import assert_same_outputs, greedy, run, speculating
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

MIN_CONTEXT = 300
# 39 blocks of 32 tokens for eight requests of up to 20 blocks.
SMALL = dict(max_model_len=1024, num_gpu_blocks_override=40, max_num_batched_tokens=256)


@pytest.fixture(
    scope="module", params=["draft", pytest.param("lookup", marks=pytest.mark.thorough)]
)
def llm(engines, pair, request):
    keys = triforce(retrieval_budget=192) | {"min_context": MIN_CONTEXT}
    if request.param == "draft":
        keys["model"] = pair["draft"]
    return engines.get(
        pair["target"], keys, enable_prefix_caching=True, disable_log_stats=False, **SMALL
    )


def metric(llm, name: str) -> int:
    return next(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")


def assert_nothing_is_kept(llm) -> None:
    """All blocks are free; the private caches belong to the last batch at most."""
    scheduler = scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block
    assert len(built(llm).speculator.level2.cache) <= 8


def test_preemption_prefix_hits_and_blocks_that_change_owner(stock, llm, text):
    """A load that does not fit: requests lose their blocks and come back, others take them over,
    some prompts share their beginning; prompts are read in chunks while others speculate."""
    draw = random.Random(3)
    shared = text[:256]
    prompts = [
        text[(s := draw.randrange(0, 11000)) : s + draw.choice([150, 290, 420, 560])]
        for _ in range(12)
    ] + [shared + text[(s := draw.randrange(300, 11000)) : s + 90] for _ in range(6)]
    params = [greedy(draw.choice([20, 60, 100])) for _ in prompts]
    order = draw.sample(range(len(prompts)), len(prompts))
    prompts, params = [prompts[i] for i in order], [params[i] for i in order]

    before = metric(llm, "num_preemptions"), metric(llm, "prefix_cache_hits")
    wanted = run(stock, prompts, params)
    with speculating(llm):
        found = run(llm, prompts, params)
    assert assert_same_outputs(stock, wanted, found) >= len(prompts) - 1
    assert metric(llm, "num_preemptions") > before[0]
    assert metric(llm, "prefix_cache_hits") > before[1]
    assert_nothing_is_kept(llm)


def test_abort_between_proposal_and_full_pass(stock, llm, text):
    """Aborted requests leave nothing behind, and a new one of the same name starts afresh."""
    engine = llm.llm_engine
    prompts = {"a": text[:400], "b": text[700:1100]}
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, greedy(60))
    for _ in range(8):
        engine.step()
    engine.abort_request(["a"])
    again = text[1500:1950]
    engine.add_request("a", {"prompt_token_ids": again}, greedy(30))
    found = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: o for o in engine.step() if o.finished}
    wanted = run(stock, [again, prompts["b"]], [greedy(30), greedy(60)])
    assert_same_outputs(stock, wanted, [found["a"], found["b"]])
    assert_nothing_is_kept(llm)


def test_a_given_min_context_is_reached_while_a_prompt_is_read_in_chunks(engines, pair, text):
    """A chunk brings hundreds of tokens a step: the batch must not rest for as many steps as tokens
    are missing. As many proposals as where the prompt is read at once."""
    keys = {"method": "triforce", "retrieval_budget": 192, "min_context": 1000}
    proposals = []
    for num_tokens in (512, 2048):
        llm = engines.get(
            pair["target"], keys, max_model_len=2048, max_num_batched_tokens=num_tokens
        )
        before = counters_of(llm)
        run(llm, [text[:1500]], [greedy(80)])
        proposals.append(counters_of(llm).since(before).num_proposals)
    assert min(proposals) > 5, proposals


def test_preempted_requests_do_not_use_up_level_1s_windows(engines, pair, stock, text):
    """Three requests had a window where two run at a time: the one that was preempted for a request
    of higher priority gives its own up, and reads it anew when it comes back."""
    keys = triforce(retrieval_budget=192, model=pair["draft"])
    llm = engines.get(
        pair["target"],
        keys,
        max_model_len=512,
        max_num_seqs=2,
        num_gpu_blocks_override=24,
        scheduling_policy="priority",
    )
    prompts = {"a": text[:320], "b": text[600:920], "c": text[1200:1240]}
    params = greedy(40)
    a, b, c = ((name, prompt, params, int(name != "c")) for name, prompt in prompts.items())
    found = drive(llm, {0: [a, b], 5: [c]})
    wanted = run(stock, list(prompts.values()), [params] * 3)
    assert_same_outputs(stock, wanted, [found[name] for name in prompts])
    assert len(built(llm).speculator.level1.model.cache) <= 2
    assert_nothing_is_kept(llm)


def test_who_left_is_forgotten_though_nobody_speculates(engines, pair, text):
    """While the batch rests nothing is proposed, and yet nothing is kept for requests that left."""
    llm = engines.get(pair["target"], triforce(retrieval_budget=192, model=pair["draft"]))
    run(llm, [text[:400], text[500:900]], [greedy(20)] * 2)
    adapter = worker_of(llm).triforce
    assert max(adapter.held_requests().values()) > 0, "the last ones, until the next step"
    rest = controller_of(llm).backoff
    rest.begin(10**6)
    at_most, rest.at_most = rest.at_most, lambda num_steps: None
    try:
        run(llm, [text[:100]], [greedy(4)])
    finally:
        rest.at_most = at_most
        rest.at_most(0)
    assert not any(adapter.held_requests().values())


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_nobody_asks_for_drafts(engines, pair, scheduler, text):
    """A message there and back for each step, where the worker is another process. A scheduler that
    is not ours knows of nothing, and asks after every step."""
    stock = engines.get(pair["target"])
    prompts = [text[:500], text[700:1500], text[:40]]
    params = [greedy(30)] * 3
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
