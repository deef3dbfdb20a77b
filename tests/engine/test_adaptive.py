"""Promise: whatever the controller decides, the output is stock vLLM's.

Its decisions hang on times, so here they are drawn at random: every route, every length, every
source of level 1, for each request and step by itself.
"""

import random
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from vllm import SamplingParams
from vllm import _custom_ops as ops

from tests.conftest import triforce
from tests.generation import assert_same_tokens, generate
from tests.inside import controller_of, scheduler_of, worker_of
from tests.joint import SETTINGS, asked_joint, exact, models, prompt, pvalue, sample
from tests.outputs import run
from tests.parity.cases import TWELVE
from tests.parity.disturbing import replaced, watch
from vllm_triforce.controller import CostModel
from vllm_triforce.controller.routes import HIERARCHICAL, PLAIN, PLAIN_ROUTE, Choice
from vllm_triforce.controller.stop_rule import StopRule
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.runner_v1 import calibration
from vllm_triforce.selection import POLICIES

pytestmark = pytest.mark.engine
__all__ = ["exact", "models", "prompt"]  # fixtures


class Dice:
    """Decides in the place of a controller, and remembers what it decided."""

    def __init__(self, controller, seed: int) -> None:
        self.draw = random.Random(seed)
        self.decided: Counter[str] = Counter()
        self._sources = {source.name: source for source in controller.sources}
        levels = [HIERARCHICAL] * 2 * controller.config.uses_level2
        self._routes = [PLAIN_ROUTE, *levels, *self._sources]
        self._controller = controller

    def choose(self, candidates, num_plain=0):
        for candidate in candidates:
            self._controller.acceptance.of(candidate.request_id, candidate.is_greedy)
        if self.draw.random() < 0.2:
            self._controller.backoff.begin(self.draw.randint(1, 4))
            self.decided["rest"] += 1
            return [PLAIN] * len(candidates)
        return [self._choose(candidate) for candidate in candidates]

    def _choose(self, candidate):
        route = self.draw.choice(self._routes)
        source = self._sources.get(route)
        match_class = None if source is None else source.match_class(candidate.match_classes)
        if source is not None and match_class is None:
            route = HIERARCHICAL if HIERARCHICAL in self._routes else PLAIN_ROUTE
        self.decided[route] += 1
        if route == PLAIN_ROUTE:
            return PLAIN
        return Choice(route, self.draw.randint(1, candidate.max_tokens), match_class)

    def choose_draft(self, request_id, has_seed, match_classes, num_rows, most):
        source = self.draw.choice([None, *self._sources, *self._sources])
        self.decided[f"level 1: {source}"] += 1
        return source, self.draw.randint(0, most)

    def keeps(self, rule, row, top_prob) -> bool:
        """As good as random, but given by the distribution that the token would be drawn from."""
        is_kept = rule.rates[row] is None or bool(int(1e4 * top_prob) % 4)
        self.decided["draft goes on" if is_kept else "draft ends"] += 1
        if is_kept:
            rule.classes[row].append(0)
        return is_kept


@contextmanager
def rolled(llm, seed: int):
    """Let dice decide meanwhile; they are yielded."""
    controller = controller_of(llm)
    dice = Dice(controller, seed)
    with (
        replaced(controller, "choose", dice.choose),
        replaced(controller, "choose_draft", dice.choose_draft),
        replaced(StopRule, "keeps", lambda rule, *place: dice.keeps(rule, *place)),
        replaced(StopRule, "goes_on", lambda rule, row: rule.num_reqs % 2 or len(rule.means) > 1),
    ):
        yield dice


@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in ("retrieval", "streaming")))
        for name in sorted(POLICIES.names)
    ],
)
def test_the_default_starts_in_bfloat16(engines, gqa_pair, selection):
    """What the passes are measured with has the model's own numbers, as a user's engine has."""
    keys = dict(method="triforce", model=gqa_pair["draft"], retrieval_budget=256, min_context=0)
    llm = engines.get(gqa_pair["target"], keys | {"selection": selection}, dtype="bfloat16")
    assert generate(llm, [[*range(2, 50)] * 12], max_tokens=8)


@pytest.mark.parametrize(
    "with_draft, temperature, seed",
    [(True, 0.0, 13), (True, 0.8, 23), pytest.param(False, 0.0, 14, marks=pytest.mark.thorough)],
    ids=["draft", "beside sampled", "lookup"],
)
def test_random_decisions_greedy(engines, pair, with_draft, temperature, seed, text):
    """Whatever others of a batch propose, sampled ones too, greedy requests get stock's tokens."""
    keys = triforce(retrieval_budget=256, adaptive=True, gamma=None)
    if with_draft:
        keys["model"] = pair["draft"]
    llm, stock = engines.get(pair["target"], keys), engines.get(pair["target"])
    prompts = [text[i * 150 :][: 40 + 150 * i] for i in range(12)]
    prompts[3] = prompts[3][:100] * 5  # repeats itself: lookups are right
    sampled = [i % 2 == 0 and temperature > 0 for i in range(12)]
    params = [
        SamplingParams(temperature=temperature * its, top_p=0.9, max_tokens=64, ignore_eos=True)
        for its in sampled
    ]
    before = counters_of(llm)
    with rolled(llm, seed) as dice:
        outputs = run(llm, prompts, params)
    counted = counters_of(llm).since(before)
    answers = generate(stock, prompts, max_tokens=64)
    for p, wanted, output, its in zip(prompts, answers, outputs, sampled):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 64
        if not its:
            assert_same_tokens(stock, p, wanted, tokens)
    assert counted.num_level2_accepted > 60 and counted.num_level3_rejections > 10
    names = [source.name for source in controller_of(llm).sources]
    levels = [f"level 1: {name}" for name in [None, *names]]
    for name in ("rest", PLAIN_ROUTE, HIERARCHICAL, *names, *levels):
        assert dice.decided[name] > 2, dice.decided


@pytest.mark.parametrize(
    "setting, has_length",
    [("T=1", True), ("T=1", False), pytest.param("T=0.6", True, marks=pytest.mark.thorough)],
)
def test_random_decisions_sampled(engines, models, prompt, exact, setting, has_length):
    """The exact joint distribution of two tokens, as in tests/joint.py. Without a given length the
    next token's distribution ends a draft."""
    window = {name: TWELVE[name] for name in TWELVE if has_length or "speculative" not in name}
    keys = triforce(model=models["draft"], adaptive=True, **window)
    llm = engines.get(models["target"], keys, max_model_len=512, max_num_seqs=64)
    before = counters_of(llm)
    with rolled(llm, seed=7 if has_length else 8) as dice:
        samples = sample(llm, prompt, **SETTINGS[setting])
    counted = counters_of(llm).since(before)
    assert pvalue(samples, asked_joint(exact, prompt, SETTINGS[setting])) > 1e-4
    assert 0.05 < counted.level2_acceptance_rate < 0.98
    ends = ("draft goes on", "draft ends")
    assert all(count > 10 for count in dice.decided.values()), dice.decided
    assert has_length or all(dice.decided[name] > 50 for name in ends), dice.decided


def test_random_decisions_without_level2(engines, models, prompt, exact):
    """Greedy requests beside sampled ones, from the draft and prompt lookup, straight to the full
    pass."""
    keys = triforce(model=models["draft"], adaptive=True, levels="1,3")
    llm = engines.get(models["target"], keys, max_model_len=512, max_num_seqs=64)
    with rolled(llm, seed=9) as dice:
        samples = sample(llm, prompt, **SETTINGS["T=1"])
    assert pvalue(samples, asked_joint(exact, prompt, SETTINGS["T=1"])) > 1e-4
    names = {source.name for source in controller_of(llm).sources}
    assert names == {"draft_model", "prompt_lookup"}
    assert all(dice.decided[name] > 10 for name in names), dice.decided


def test_a_draft_that_nobody_asks_keeps_steps_comparable(engines, pair, monkeypatch, text):
    """What a proposal was expected to take is forgotten where it has to read what it will not read
    again: with the request's first one by level 2, and not for a window that the draft has not read
    since nobody asks it."""
    keys = triforce(model=pair["draft"], retrieval_budget=256, adaptive=True, gamma=None)
    llm = engines.get(pair["target"], keys)
    controller, forgotten = controller_of(llm), []
    choices = lambda found, *_: [Choice(HIERARCHICAL, min(3, c.max_tokens)) for c in found]  # noqa: E731
    monkeypatch.setattr(controller, "choose", choices)
    monkeypatch.setattr(controller, "choose_draft", lambda *_: (None, 0))
    monkeypatch.setattr(controller, "forget_plan", lambda: forgotten.append(1))
    before = counters_of(llm)
    generate(llm, [text[:600]], max_tokens=48)
    assert counters_of(llm).since(before).num_proposals > 5
    assert len(forgotten) == 1


def test_its_own_decisions(engines, pair, text):
    """Defaults, lengths from 20 to 4,000 tokens in one batch: same output, and it did speculate."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 1024}
    llm, stock = engines.get(pair["target"], keys), engines.get(pair["target"])
    prompts = [text[:length] for length in (20, 300, 2000, 4000)]
    before = counters_of(llm)
    found = generate(llm, prompts, max_tokens=48)
    for p, wanted, tokens in zip(prompts, generate(stock, prompts, max_tokens=48), found):
        assert_same_tokens(stock, p, wanted, tokens)
    assert counters_of(llm).since(before).num_level2_accepted > 0


def test_a_greedy_request_with_a_seed_is_chosen_for(engines, pair, monkeypatch, text):
    """It draws nothing that a seed could keep: alone and beside others it is as one without."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 1024}
    llm, stock = engines.get(pair["target"], keys), engines.get(pair["target"])
    controller, candidates = controller_of(llm), []
    choose = controller.choose

    def chosen(found, num_plain=0):
        candidates.extend(found)
        return choose(found, num_plain)

    monkeypatch.setattr(controller, "choose", chosen)
    # No request may wait until a decision is paid for: some end before that.
    monkeypatch.setattr(CostModel, "decision_s", property(lambda _: 0.0, lambda *_: None))
    asked = [(0, 48, 1), (0, 48, 2), (0, 20, 1), (1.0, 30, 3), (0, 48, None), (0.7, 20, 3)]
    asked += [(0, 48, 2**31), (0, 12, 0)]
    prompts = [text[97 * i :][: 250 + 130 * i] for i in range(len(asked))]
    params = [
        SamplingParams(temperature=t, max_tokens=m, seed=s, ignore_eos=True, detokenize=False)
        for t, m, s in asked
    ]
    wanted = generate(stock, prompts, max_tokens=48)
    outputs = run(llm, prompts, params) + run(llm, prompts[:1], params[:1])
    for i, output in zip([*range(len(asked)), 0], outputs):
        temperature, count, _ = asked[i]
        if not temperature:
            found = list(output.outputs[0].token_ids)
            assert_same_tokens(stock, prompts[i], wanted[i][:count], found)
    drawing = [i for i, (temperature, _, _) in enumerate(asked) if temperature]
    number = {output.request_id: i for i, output in enumerate(outputs[:-1])}
    number[outputs[-1].request_id] = 0
    found = {number[c.request_id.split("-")[0]]: c.has_seed for c in candidates}
    assert found == {i: i in drawing for i in range(len(asked))}


def test_plain_steps_are_timed(engines, pair, text):
    """Of a batch that cannot be speculated on yet it is learnt what a plain step takes."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 1024}
    llm = engines.get(pair["target"], keys)
    controller = controller_of(llm)
    measured, before = controller.measured, controller.measured.copy()
    measured.overheads = {}

    def plainly(candidates, num_plain=0):
        controller.backoff.begin(6)
        return [PLAIN] * len(candidates)

    with replaced(controller, "choose", plainly):
        generate(llm, [text[:200], text[200:400]], max_tokens=40)
    assert measured.overheads.keys() == {(2, True)}
    measured.overheads = before.overheads


def test_the_step_that_verifies_before_a_rest_is_timed(engines, pair, text):
    """A trial is verified in the step whose decision is to rest; its costs are learnt from that."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 256}
    llm = engines.get(pair["target"], keys)
    controller = controller_of(llm)
    decisions, seen = [], []

    def once(candidates, num_plain=0):
        decisions.append(candidates)
        for candidate in candidates:
            controller.acceptance.of(candidate.request_id, candidate.is_greedy)
        if len(decisions) % 2:
            return [Choice("draft_model", 4, 0)] * len(candidates)
        controller.backoff.begin(6)
        return [PLAIN] * len(candidates)

    def note(step, planned):
        seen.append(step.num_drafts > 0)

    with replaced(controller, "choose", once), replaced(controller, "observe_step", note):
        generate(llm, [text[:400]], max_tokens=60)
    assert sum(seen) > 2


def test_steps_without_speculation_are_stocks(engines, pair, text):
    """At rest the runner is told of no speculation at all, and is told again afterwards."""
    keys = triforce(model=pair["draft"], retrieval_budget=256) | {"min_context": 500}
    llm = engines.get(pair["target"], keys)
    runner = worker_of(llm).model_runner
    seen = []

    def note(*_) -> None:
        seen.append(runner.speculative_config is None)

    with runner.model.register_forward_pre_hook(note):  # level 2's passes too, while it proposes
        generate(llm, [text[:100]], max_tokens=64)
        assert sum(seen) > 0.9 * len(seen)  # nothing to look for before the 500th token
        assert runner.speculative_config is not None
        seen.clear()
        generate(llm, [text[:490]], max_tokens=40)
    # From 500 tokens on only the last, which has nothing to propose.
    assert any(seen[:11]) and not any(seen[11:-1])


def test_plain_steps_sample_what_stock_samples(engines, pair, text):
    """With the same random numbers the same tokens."""
    keys = triforce(model=pair["draft"], retrieval_budget=256) | {"min_context": 500}
    prompts = [{"prompt_token_ids": text[i * 100 : i * 150 + 100]} for i in range(6)]
    params = [
        SamplingParams(
            temperature=(0.3, 0.8, 1.2)[i % 3],
            top_p=(0.5, 0.9, 1.0)[i // 2],
            top_k=(0, 20)[i % 2],
            max_tokens=40 + i,
            ignore_eos=True,
        )
        for i in range(6)
    ]
    found = []
    for spec in (None, keys):
        llm = engines.get(pair["target"], spec)
        torch.manual_seed(7)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "num_speculative_tokens", [None, 1, pytest.param(2, marks=pytest.mark.thorough)]
)
def test_calibration_stays_within_its_tables(engines, pair, monkeypatch, num_speculative_tokens):
    """Every pass that is measured at start-up reads and writes blocks that its table has: beyond
    the table's end the kernel would read anything."""
    # The finest grid, however slow this machine is.
    monkeypatch.setattr(calibration, "_MAX_SECONDS", float("inf"))
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 1024}
    if num_speculative_tokens is not None:
        keys["num_speculative_tokens"] = num_speculative_tokens
    llm = engines.get(pair["target"], keys)
    original, seen = ops.cpu_attention_with_kv_cache, []

    def spy(**kwargs):
        table, cache = kwargs["block_table"], kwargs["key_cache"]
        capacity = table.shape[1] * cache.shape[2] * cache.shape[3] // kwargs["query"].shape[-1]
        seen.append((int(kwargs["seq_lens"].max()), capacity))
        assert int(table.max()) < cache.shape[0]
        return original(**kwargs)

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", spy)
    worker_of(llm).triforce.calibrate()
    assert len(seen) > (500 if num_speculative_tokens is None else 100)
    assert all(longest <= capacity for longest, capacity in seen), max(seen)


def test_what_passes_take_is_told(engines, pair):
    """As measured at start-up, where something is chosen by it; or anew, whatever is chosen."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 1024}
    llm = engines.get(pair["target"], keys)
    (told,) = llm.collective_rpc("triforce_measured")
    measured = controller_of(llm).measured.measured
    assert told == measured.to_dict() and type(measured)(**told) == measured
    llm = engines.get(pair["target"], {**keys, "adaptive": False, "min_context": 0})
    assert llm.collective_rpc("triforce_measured") == [None]
    (anew,) = llm.collective_rpc("triforce_measured", args=(True,))
    assert anew.keys() == told.keys() and anew["draft"] > 0 and anew["full_by_rows"][0][1] > 0
    with pytest.raises(ValueError, match="no TriForce counters"):
        counters_of(engines.get(pair["target"]))


def test_a_prompt_that_just_fits_is_read_in_one_step(engines, pair, text):
    """Steps are filled as stock vLLM fills them: no token of the budget is kept for drafting."""
    scheduled = []
    for keys in (None, {"method": "triforce", "model": pair["draft"], "retrieval_budget": 256}):
        llm = engines.get(pair["target"], keys, max_num_batched_tokens=256, max_num_seqs=4)
        with watch(scheduler_of(llm), "schedule") as calls:
            generate(llm, [text[:128], text[128:256], text[256:512]], max_tokens=1)
        steps = [sorted(output.num_scheduled_tokens.values()) for _, output in calls]
        scheduled.append([step for step in steps if step])
    assert scheduled[0] == scheduled[1] == [[128, 128], [256]]
