"""Promise: whatever the controller decides, the output is stock vLLM's.

Its decisions hang on times, so here they are drawn at random: every route, every length, every
source of level 1, for each request and step by itself.
"""

import random
from collections import Counter
from contextlib import contextmanager

import pytest
from vllm import SamplingParams
from vllm import _custom_ops as ops
from vllm.sampling_params import StructuredOutputsParams

from tests.conftest import triforce
from tests.generation import assert_same_tokens, generate
from tests.inside import controller_of, drive, worker_of
from tests.joint import SETTINGS, asked_joint, exact, models, prompt, pvalue, sample
from tests.outputs import run
from tests.parity.cases import TWELVE
from tests.parity.disturbing import replaced, watch
from vllm_triforce.controller import CostModel
from vllm_triforce.controller.draft_lengths import StopRule
from vllm_triforce.controller.routes import HIERARCHICAL, PLAIN, PLAIN_ROUTE, Choice
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
        num_tokens = self.draw.randint(1, candidate.max_tokens)
        return Choice(route, num_tokens, match_class=match_class)

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
        assert dice.decided[name] > 1, dice.decided


@pytest.mark.parametrize(
    "setting, has_length, levels",
    [
        ("T=1", True, "1,2,3"),
        ("T=1", False, "1,2,3"),
        ("T=1", False, "1,3"),
        pytest.param("T=0.6", True, "1,2,3", marks=pytest.mark.thorough),
    ],
)
def test_random_decisions_sampled(engines, models, prompt, exact, setting, has_length, levels):
    """The exact joint distribution of two tokens, as in tests/joint.py. Without a given length the
    next token's distribution ends a draft."""
    window = {name: TWELVE[name] for name in TWELVE if has_length or "speculative" not in name}
    keys = triforce(model=models["draft"], adaptive=True, levels=levels)
    keys |= window if levels == "1,2,3" else {}
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


def test_greedy_requests_have_no_seed_and_those_with_a_grammar_may_be_sampled(
    engines, pair, monkeypatch, text
):
    """To the controller: a greedy request draws nothing that a seed could keep, and what is drafted
    for a sampled one with a grammar is certain, but accepted as seldom as sampled tokens are."""
    keys = {"method": "triforce", "model": pair["draft"], "retrieval_budget": 1024}
    llm = engines.get(pair["target"], keys)
    # No request may wait until a decision is paid for: some end before that.
    monkeypatch.setattr(CostModel, "decision_s", property(lambda _: 0.0, lambda *_: None))
    grammar = StructuredOutputsParams(regex="[ a-m]{30,}")
    asked = {
        "greedy": SamplingParams(temperature=0, seed=1, max_tokens=20, ignore_eos=True),
        "sampled": SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True),
        "grammar": SamplingParams(temperature=1.0, max_tokens=20, structured_outputs=grammar),
    }
    with watch(controller_of(llm), "choose") as calls:
        drive(llm, {0: [(name, text[:300], params) for name, params in asked.items()]})
    found = {
        (its.request_id.split("-")[0], its.is_greedy, its.has_seed)
        for (candidates, *_), _ in calls
        for its in candidates
    }
    assert found == {("greedy", True, False), ("sampled", False, True), ("grammar", False, False)}


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
