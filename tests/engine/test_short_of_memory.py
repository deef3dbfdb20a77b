"""Promise: a KV cache that just fits, and limits that leave hardly any room, change nothing: the
tokens are stock vLLM's, and where nothing is speculated on, so is the number of steps."""

import pytest
from vllm import SamplingParams

from tests.conftest import triforce
from tests.generation import assert_same_tokens
from tests.inside import scheduler_of
from tests.outputs import assert_same_outputs, greedy, run
from tests.parity.disturbing import watch
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

# Four blocks of 32 tokens, beside vLLM's null block: the longest request needs them all.
FULL = dict(max_model_len=128, num_gpu_blocks_override=5, max_num_batched_tokens=128)
LONG = dict(num_speculative_tokens=32, gamma=8)


@pytest.fixture(scope="module")
def stock(engines, pair):
    return engines.get(pair["target"], **FULL)


@pytest.fixture(scope="module")
def loop(text):
    return text[40:64] * 40


def answers(llm, prompts, params):
    """Outputs, steps of the scheduler, and preemptions; all blocks are free afterwards."""
    scheduler = scheduler_of(llm)
    with watch(scheduler, "schedule") as steps, watch(scheduler, "_preempt_request") as preempted:
        outputs = run(llm, prompts, params)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return outputs, len(steps), len(preempted)


def test_as_many_steps_as_stock_where_nothing_is_speculated_on(engines, pair, stock, text):
    """Four requests of a block each fill the cache: room for drafts would halve the batch."""
    llm = engines.get(pair["target"], {"method": "triforce"}, **FULL)
    prompts = [text[50 * n : 50 * n + 20] for n in range(12)]
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=12)
    (_, wanted, _), (_, found, lost) = (answers(its, prompts, params) for its in (stock, llm))
    assert found <= wanted / 0.98 and lost == 0, (wanted, found, lost)


ALWAYS, CHOOSING = triforce(**LONG), {"method": "triforce", "num_speculative_tokens": 32}
# 25 blocks for the longest request.
OF_800 = dict(max_model_len=800, max_num_batched_tokens=256, max_num_seqs=4)


def with_model(keys: dict, pair, with_draft: bool) -> dict:
    return {**keys, "model": pair["draft"]} if with_draft else keys


@pytest.mark.parametrize(
    "limits, with_draft, keys",
    [
        pytest.param(FULL, True, triforce(retrieval_budget=64, **LONG), id="128 tokens"),
        *(
            pytest.param(
                OF_800 | dict(num_gpu_blocks_override=num_blocks, enable_prefix_caching=caching),
                *(with_draft, keys),
                id=f"800 tokens, {name}",
                marks=pytest.mark.thorough,
            )
            for num_blocks, with_draft, keys, caching, name in (
                (26, True, ALWAYS, True, "draft, always"),
                (27, False, ALWAYS, False, "lookup, always"),
                (26, True, CHOOSING, False, "draft, choosing"),
                (27, False, CHOOSING, True, "lookup, choosing"),
            )
        ),
    ],
)
def test_a_kv_cache_that_just_fits(engines, pair, text, loop, limits, with_draft, keys):
    """One request to the last token of the cache; several that cannot be there together."""
    stock = engines.get(pair["target"], **limits)
    llm = engines.get(pair["target"], with_model(keys, pair, with_draft), **limits)
    length, before, preempted = limits["max_model_len"], counters_of(llm), 0
    for prompts in (
        [loop[: 5 * length // 8]],
        [loop[: 5 * length // 8], text[: 3 * length // 4], loop[: length - 10], text[:5]],
        [text[: length // 5]] * 2 + [loop[: length // 3]],
    ):
        params = [greedy(length - len(prompt)) for prompt in prompts]
        (wanted, _, lost), (found, *_) = (answers(its, prompts, params) for its in (stock, llm))
        assert_same_outputs(stock, wanted, found)
        preempted += lost
    assert preempted > 0, "or the cache is not too small for them"
    counted = counters_of(llm).since(before)
    assert not (with_draft and "adaptive" in keys) or counted.num_level2_accepted > 0, counted


@pytest.mark.thorough
@pytest.mark.parametrize(
    "length, seqs, batched, block, with_draft, keys",
    [
        # A budget of thousands of tokens in a context of less than a block.
        (100, 1, 100, 128, True, triforce()),
        (100, 8, 128, 128, True, {"method": "triforce"}),
        (129, 1, 129, 128, False, {"method": "triforce", "min_context": 0}),
        (64, 1, 64, 32, True, {"method": "triforce", "min_context": 0}),
        (256, 2, 64, 32, True, triforce()),
        (256, 2, 64, 32, False, {"method": "triforce"}),
        (16, 1, 16, 32, False, triforce()),
        (16, 1, 16, 32, True, {"method": "triforce"}),
    ],
)
def test_very_small_limits(
    engines, pair, text, loop, length, seqs, batched, block, with_draft, keys
):
    """Prompts of all lengths at which something ends, to the last token of the context."""
    stock = engines.get(pair["target"])
    limits = dict(
        max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=batched, block_size=block
    )
    llm = engines.get(pair["target"], with_model(keys, pair, with_draft), **limits)
    sizes = sorted({1, 2, length // 2, length - 3, length - 2, length - 1})
    for prompts in ([text[:size] for size in sizes], [loop[:size] for size in sizes]):
        found = run(llm, prompts, greedy(None))
        wanted = run(stock, prompts, [greedy(length - size) for size in sizes])
        for prompt, a, b in zip(prompts, wanted, found):
            assert b.outputs[0].finish_reason == a.outputs[0].finish_reason == "length"
            tokens = [list(its.outputs[0].token_ids) for its in (a, b)]
            assert_same_tokens(stock, prompt, *tokens)
    assert counters_of(llm).num_proposals > 0 or length != 100 or seqs > 1
    params = SamplingParams(temperature=1.0, n=2, max_tokens=None)
    for output in run(llm, [loop[: length // 2]] * 3, params):
        assert all(len(its.token_ids) <= length - length // 2 for its in output.outputs)
