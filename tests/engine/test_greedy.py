"""Promise: greedy output is stock vLLM's, token for token."""

import random

import pytest

from tests.conftest import triforce
from tests.engine.test_level2 import built
from tests.generation import assert_same_tokens, generate
from tests.models import held_out_tokens
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.selection import POLICIES

pytestmark = pytest.mark.engine

NUM_PROMPTS = 40
# (gamma, num_speculative_tokens, draft model?, tokens in the budget)
CONFIGS = [
    (1, 1, True, 128),
    (2, 6, True, 1024),
    (4, 8, True, 256),
    (3, 5, False, 512),
    (1, 3, False, 128),
    (2, 6, False, 4096),
]


def lengths() -> list[int]:
    """From 50 to 8,000 tokens, evenly on a logarithmic scale."""
    return [round(50 * 160 ** (i / (NUM_PROMPTS - 1))) for i in range(NUM_PROMPTS)]


def real_prompts(llm) -> list[list[int]]:
    text = held_out_tokens(llm.get_tokenizer(), 24000)
    starts = random.Random(0)
    return [text[(s := starts.randrange(0, 24000 - n)) : s + n] for n in lengths()]


def random_prompts(llm) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, 4096) for _ in range(n)] for n in lengths()]


class Answers:
    """Stock vLLM's, of a model: every setting is compared with the same ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def of(self, stock, prompts: list[list[int]]) -> list[list[int]]:
        model = stock.model_config.model
        keys = [(model, tuple(prompt)) for prompt in prompts]
        new = [i for i, key in enumerate(keys) if key not in self._known]
        for i, tokens in zip(new, generate(stock, [prompts[i] for i in new]) if new else []):
            self._known[keys[i]] = tokens
        return [self._known[key] for key in keys]


ANSWERS = Answers()


def check_all(stock, llm, prompts, share: slice) -> None:
    """Batches of 1 to 8 requests of unequal length, joining and leaving as they end."""
    chosen = list(range(len(prompts)))[share]
    random.Random(1).shuffle(chosen)
    size, identical = 0, 0
    while chosen:
        size = size % 8 + 1
        batch, chosen = [prompts[i] for i in chosen[:size]], chosen[size:]
        wanted, found = ANSWERS.of(stock, batch), generate(llm, batch)
        for prompt, w, f in zip(batch, wanted, found):
            identical += assert_same_tokens(stock, prompt, w, f)
    # Ties within numerical noise are proved one by one; they must stay rare.
    assert identical >= 0.9 * len(range(len(prompts))[share])


@pytest.mark.parametrize("gamma, num_tokens, with_draft, budget", CONFIGS)
def test_multi_head_attention(engines, pair, gamma, num_tokens, with_draft, budget):
    keys = triforce(gamma=gamma, num_speculative_tokens=num_tokens, retrieval_budget=budget)
    if with_draft:
        keys["model"] = pair["draft"]
    stock = engines.get(pair["target"])
    llm = engines.get(pair["target"], keys)
    # The paper's setting sees all prompts, the others a third each.
    third = CONFIGS.index((gamma, num_tokens, with_draft, budget)) % 3
    share = slice(None) if (gamma, with_draft) == (2, True) else slice(third, None, 3)
    check_all(stock, llm, real_prompts(stock), share)


@pytest.mark.parametrize("gamma, num_tokens, with_draft, budget", CONFIGS)
def test_grouped_query_attention(engines, gqa_pair, gamma, num_tokens, with_draft, budget):
    keys = triforce(gamma=gamma, num_speculative_tokens=num_tokens, retrieval_budget=budget)
    if with_draft:
        keys |= {"model": gqa_pair["draft"], "num_recent_tokens": 120}
    stock = engines.get(gqa_pair["target"])
    llm = engines.get(gqa_pair["target"], keys)
    third = CONFIGS.index((gamma, num_tokens, with_draft, budget)) % 3
    share = slice(None) if (gamma, with_draft) == (2, False) else slice(third, None, 3)
    check_all(stock, llm, random_prompts(stock), share)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"retrieval"}))
def test_every_policy_selects_and_keeps_the_output(engines, gqa_pair, policy):
    """On Runner V1; on V2 in tests/v2. What it selects was looked through: drafts were tested."""
    keys = triforce(gamma=2, num_speculative_tokens=4, retrieval_budget=256, selection=policy)
    stock, llm = engines.get(gqa_pair["target"]), engines.get(gqa_pair["target"], keys)
    assert built(llm).speculator.level2.cache.policy.name == policy
    check_all(stock, llm, random_prompts(stock), slice(1, None, 4))
    assert counters_of(llm).num_level2_passes > 100


def test_chunked_prefill_beside_speculation(engines, pair):
    """Long prompts prefilled in small chunks while other requests speculate."""
    arguments = dict(max_num_batched_tokens=256, enable_prefix_caching=True)
    stock = engines.get(pair["target"], None, **arguments)
    keys = triforce(model=pair["draft"], retrieval_budget=256)
    llm = engines.get(pair["target"], keys, **arguments)
    prompts = [p for p in real_prompts(stock) if len(p) < 3000][::4]
    for prompt, wanted, found in zip(prompts, generate(stock, prompts), generate(llm, prompts)):
        assert_same_tokens(stock, prompt, wanted, found)


def test_context_gate_is_per_request(engines, pair):
    """Requests below min_context are not speculated on, those above are, in one batch."""

    stock = engines.get(pair["target"])
    keys = triforce(model=pair["draft"], retrieval_budget=256) | {"min_context": 1000}
    llm = engines.get(pair["target"], keys)
    prompts = [p for p in real_prompts(stock) if len(p) < 4000][::3]
    short = [p for p in prompts if len(p) < 900]
    assert short and len(short) < len(prompts)

    before = counters_of(llm)
    assert generate(llm, short) == generate(stock, short)
    assert counters_of(llm).since(before).num_proposals == 0
    for prompt, wanted, found in zip(prompts, generate(stock, prompts), generate(llm, prompts)):
        assert_same_tokens(stock, prompt, wanted, found)
    spoken = counters_of(llm).since(before)
    assert 0 < spoken.num_proposals <= 32 * (len(prompts) - len(short))


def test_max_model_len_and_max_tokens_inside_a_proposal(engines, pair):
    """A proposal never writes past what the request may reach, and one full request near the
    limit does not stop the others."""
    arguments = dict(max_model_len=600)
    stock = engines.get(pair["target"], None, **arguments)
    llm = engines.get(pair["target"], triforce(retrieval_budget=256), **arguments)
    text = real_prompts(engines.get(pair["target"]))[-1]
    prompts = [text[:n] for n in (300, 570, 590, 597)]
    for max_tokens in (1, 2, 5, 400):
        wanted = generate(stock, prompts, max_tokens=max_tokens)
        found = generate(llm, prompts, max_tokens=max_tokens)
        assert [len(tokens) for tokens in found] == [len(tokens) for tokens in wanted]
        for prompt, w, f in zip(prompts, wanted, found):
            assert_same_tokens(stock, prompt, w, f)


def test_requests_join_and_leave_while_others_speculate(engines, pair):
    """Continuous batching: arrivals at every few steps, lengths and ends all different."""
    from vllm import SamplingParams

    stock = engines.get(pair["target"])
    llm = engines.get(pair["target"], triforce(model=pair["draft"], retrieval_budget=256))
    prompts = [p for p in real_prompts(stock) if len(p) < 1500][::2]
    wanted = [generate(stock, [p], max_tokens=8 + 5 * i)[0] for i, p in enumerate(prompts)]
    engine, found, step = llm.llm_engine, {}, 0
    waiting = list(enumerate(prompts))
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 3 == 0:
            i, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=8 + 5 * i, ignore_eos=True)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    for i, prompt in enumerate(prompts):
        assert_same_tokens(stock, prompt, wanted[i], found[i])
