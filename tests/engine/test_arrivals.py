"""Promise: requests that come and go neither cost the others anything nor change what they get."""

import itertools

import numpy as np
import pytest
from vllm import SamplingParams

from benchmarks.first_tokens import in_engine
from tests.conftest import triforce
from tests.inside import built, controller_of, drive, scheduler_of, worker_of
from tests.outputs import assert_same_outputs, greedy, run
from tests.parity.disturbing import watch
from vllm_triforce.controller import exploration as exploration_module
from vllm_triforce.controller.planner import Plan

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm(engines, pair):
    """The controller chooses; prompts are read in chunks of 128."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 192}
    return engines.get(pair["target"], keys, max_model_len=2048, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def whole(engines, pair):
    """As ``llm``; prompts are read in one step: stock vLLM's CPU build cannot read that of a
    sampled request with a seed in chunks."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 192}
    return engines.get(pair["target"], keys, max_model_len=2048)


def rest_long(llm, monkeypatch) -> None:
    """Only a seeded request is speculated on, and the others rest as long as they may."""

    def plain(options, costs, max_slowdown):
        return Plan(np.full(len(options.tokens), -1), 1.0, costs.plain_s)

    monkeypatch.setattr(exploration_module, "plan", plain)
    controller = controller_of(llm)
    monkeypatch.setattr(controller.trials, "add", lambda *args: False)
    monkeypatch.setattr(exploration_module, "SHORTEST_REST", 128)


@pytest.mark.parametrize(
    "neighbour, min_tokens",
    [*itertools.product(["decodes", "is longer"], [0, 12]), ("is read too", 0), ("leaves", 0)],
)
def test_a_seeded_request_is_as_alone(whole, text, monkeypatch, neighbour, min_tokens):
    """Beside one that decodes plainly and rests it samples the same, and proposes at the same
    places. Up to min_tokens a proposal ends before it: for a step there is no room for one."""
    rest_long(whole, monkeypatch)
    params = SamplingParams(
        temperature=1.0, seed=7, max_tokens=40, min_tokens=min_tokens, ignore_eos=True
    )
    seeded = ("seeded", text[1000:1600], params)
    others = {
        "decodes": {0: [("other", text[:60], greedy(120))], 6: [seeded]},
        "is longer": {0: [("other", text[:500], greedy(120))], 6: [seeded]},
        "is read too": {0: [("other", text[:900], greedy(60)), seeded]},
        "leaves": {0: [("other", text[:60], greedy(9))], 4: [seeded]},
    }[neighbour]
    seen = []
    for arrivals in ({0: [seeded]}, others):
        with watch(built(whole).speculator, "propose") as calls:
            tokens = drive(whole, arrivals)["seeded"].outputs[0].token_ids
        places = [
            at
            for (batch,), proposal in calls
            for name, at, proposed in zip(
                batch.request_ids, batch.num_computed_tokens, proposal.token_ids
            )
            if proposed and name.startswith("seeded")
        ]
        seen.append((tokens, places))
    (alone, places), (beside, then) = seen
    assert beside == alone
    assert min_tokens or (then == places and places[0] == 600)


def test_steps_that_give_somebody_a_first_token_are_plain(llm, stock, text, monkeypatch):
    """One request comes every other step: nothing is proposed in such a step, so that it takes
    stock's path, and prompts are read as fast as stock reads them."""
    rest_long(llm, monkeypatch)
    prompts = [text[60 * i : 60 * i + 50] for i in range(40)]
    arrivals = {2 * i: [(str(i), prompt, greedy(6))] for i, prompt in enumerate(prompts)}
    with (
        watch(worker_of(llm).triforce, "propose") as proposed,
        watch(scheduler_of(llm), "schedule") as calls,
    ):
        found = drive(llm, arrivals)
    steps = [output for _, output in calls if output.total_num_scheduled_tokens]
    assert len(proposed) <= len(steps) - 40, (len(proposed), len(steps))
    wanted = run(stock, prompts, [greedy(6)] * 40)
    assert_same_outputs(stock, wanted, [found[str(i)] for i in range(40)])


def test_a_late_prompt_is_read_in_as_many_steps_as_by_stock_vllm(engines, pair):
    """Beside eight requests that repeat themselves, whose drafts would fill a step. It just fits
    four steps: no token of the budget is kept for drafting."""
    steps = []
    for keys in (None, triforce(num_speculative_tokens=31)):
        llm = engines.get(pair["target"], keys, max_num_batched_tokens=256, max_num_seqs=16)
        steps.append([count for count, _ in in_engine(llm, 8, 992, 2, num_emitted=100)])
    assert steps[1] == steps[0] == [4, 4]


def test_a_seeded_request_keeps_its_drafts_beside_a_late_prompt(engines, pair, text):
    """It samples as alone, though the prompt could use all of each step."""
    keys = triforce(retrieval_budget=192, model=pair["draft"])
    llm = engines.get(pair["target"], keys, max_model_len=2048, max_num_batched_tokens=256)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
    seeded = ("seeded", text[1000:1200], params)
    alone = drive(llm, {0: [seeded]})["seeded"].outputs[0].token_ids
    other = ("other", text[:1500], greedy(4))
    with watch(scheduler_of(llm), "schedule") as calls:
        beside = drive(llm, {0: [seeded], 3: [other]})["seeded"].outputs[0].token_ids
    assert beside == alone
    reading = [its for _, its in calls if max(its.num_scheduled_tokens.values(), default=0) > 200]
    assert all(its.scheduled_spec_decode_tokens for its in reading[:3])


def test_a_cached_prompt_fits_a_small_step(engines, pair, stock, text):
    """A step of 32 tokens, and up to 32 drafts: padded with drafts, a prompt that is cached but for
    its last token would never be let in."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 192}
    small = engines.get(
        pair["target"], keys, max_model_len=1024, max_num_batched_tokens=32, max_num_seqs=4
    )
    prompt, params = text[:65], greedy(8)
    first = drive(small, {0: [("a", prompt, params)]})["a"]
    again = drive(small, {0: [("b", prompt, params)]})["b"]
    assert again.num_cached_tokens == 64
    assert_same_outputs(stock, run(stock, [prompt] * 2, [params] * 2), [first, again])


def test_a_request_joins_where_its_prompt_has_been_read(llm, text, monkeypatch):
    """Before that nobody could be decided for: a prompt of five chunks joins with its
    last, and one with a seed does not wait."""
    controller = controller_of(llm)
    joined, seeded, step = [], [], controller.backoff.step
    join, reset = controller.requests_joined, controller.seeded_request_joined
    monkeypatch.setattr(
        controller,
        "requests_joined",
        lambda: joined.append(controller.backoff.step - step) or join(),
    )
    monkeypatch.setattr(
        controller,
        "seeded_request_joined",
        lambda: seeded.append(controller.backoff.step - step) or reset(),
    )
    arrivals = {
        0: [("long", text[600:0:-1], greedy(12))],  # no prefix of another
        8: [
            ("short", text[720:700:-1], greedy(1)),
            (
                "seeded",
                text[1000:900:-1],
                SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True),
            ),
        ],
    }
    drive(llm, arrivals)
    assert joined == [5, 9] and seeded == [9]
