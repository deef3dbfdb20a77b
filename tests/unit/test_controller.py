"""Promise: the controller takes what is fastest by what it measured, and never pays for a guess."""

import copy
import dataclasses
import itertools
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import PLAIN, Candidate, Choice, Controller, CostModel, StepTime
from vllm_triforce.controller.acceptance import Acceptance, Rate, expected_by_length
from vllm_triforce.controller.controller import Planned
from vllm_triforce.controller.lengths import DraftLengths
from vllm_triforce.controller.measurements import Measurements, interpolate
from vllm_triforce.controller.options import Options, SharedCosts, build_options
from vllm_triforce.controller.planner import plan
from vllm_triforce.controller.routes import LEVELS, PLAIN_ROUTE, Route, SourceTraits
from vllm_triforce.controller.trials import TRIAL_SHARE, TrialBudget

# One source whose tokens take passes, and one that has some where it finds a match.
DRAFT, LOOKUP = "a draft", "a lookup"
SOURCES = [
    SourceTraits(DRAFT, (0.5,), takes_passes=True),
    SourceTraits(LOOKUP, (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)),
]

# A 7B-like model: the pass is bound by reading weights and KV, more tokens cost little.
LONG_PAYS = Measurements(
    full_by_rows=[(1, 0.010), (16, 0.0105), (128, 0.014)],
    full_by_tokens=[(1, [(16, 0.010), (100_000, 0.040)]), (17, [(16, 0.011), (100_000, 0.048)])],
    level2_by_tokens=[(1, 0.0105), (17, 0.012)],
    level2_per_row=0.0005,
    draft=0.0005,
)
# A busy machine: every token of a pass costs as much as the first.
NOTHING_PAYS = Measurements(
    full_by_rows=[(1, 0.010), (128, 1.28)],
    full_by_tokens=[(1, [(16, 0.01), (100_000, 0.1)]), (17, [(16, 0.17), (100_000, 1.7)])],
    level2_by_tokens=[(1, 0.01), (17, 0.17)],
    level2_per_row=0.01,
    draft=0.004,
)


# What the embedded pair takes on a CPU, about.
SMALL_ON_CPU = Measurements(
    full_by_rows=[(1, 0.004), (4, 0.0058), (16, 0.0095), (64, 0.022)],
    full_by_tokens=[
        (1, [(16, 0.004), (2000, 0.005), (16_000, 0.014)]),
        (17, [(16, 0.009), (2000, 0.0125), (16_000, 0.035)]),
    ],
    level2_by_tokens=[(1, 0.0045), (17, 0.010)],
    level2_per_row=0.001,
    draft=0.0008,
    draft_per_row=0.0002,
    draft_per_token=1e-5,
    selection_per_token=1e-6,
    sampling=1e-4,
)
DECIDING = 0.0015


def controller(measured: Measurements, has_draft=True, **keys) -> Controller:
    config = TriForceConfig(**keys).with_defaults(can_adapt=True, model=DRAFT).resolve(32)
    found = Controller(config, SOURCES if has_draft else SOURCES[1:])
    found.start(CostModel(measured))
    return found


def matched(length: int) -> dict[str, int]:
    """Confidence where so many tokens at the end occurred before."""
    return {LOOKUP: length - 1} if length else {}


def test_interpolation():
    points = [(1, 10.0), (3, 20.0), (5, 60.0)]
    wanted = {0: 10, 1: 10, 2: 15, 3: 20, 4: 40, 5: 60, 6: 80}
    assert {x: interpolate(points, x) for x in wanted} == wanted
    assert interpolate([(4, 7.0)], 100) == 7


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.95, 1.0])
def test_expected_tokens_are_what_happens(rate):
    draw = random.Random(0)
    expected = expected_by_length(rate, 8)
    assert expected[0] == 0
    for length in (1, 3, 8):
        total = 0
        for _ in range(20_000):
            accepted = 0
            while accepted < length and draw.random() < rate:
                accepted += 1
            total += accepted
        assert expected[length] == pytest.approx(total / 20_000, abs=0.06)


def test_rate_follows_and_forgets():
    rate = Rate(0.5, weight=4, memory=48)
    assert rate.value == 0.5
    for _ in range(200):
        rate.add(4, 4)
    assert rate.value > 0.94
    for _ in range(200):
        rate.add(4, 0)
    assert rate.value < 0.06
    for _ in range(10_000):
        rate.fade()
    assert rate.value == pytest.approx(0.5, abs=0.01)


def test_a_context_costs_what_was_measured_between_measurements_too():
    """Against interpolating by hand, one pass at a time."""
    model = CostModel(LONG_PAYS, speed=0.5)
    contexts = [5, 16, 700, 50_000, 100_000, 200_000]
    table = model.attention_table(contexts, 20)
    for row, context in enumerate(contexts):
        for tokens in (1, 9, 17, 20):
            points = [
                (q, interpolate(by_context, context) - by_context[0][1])
                for q, by_context in LONG_PAYS.full_by_tokens
            ]
            assert table[row, tokens] == pytest.approx(0.5 * interpolate(points, tokens))
    rows = 0.5 * interpolate(LONG_PAYS.full_by_rows, 12)
    found = model.full_pass([3, 9], [700, 50_000])
    assert found == pytest.approx(rows + table[2, 3] + table[3, 9])


def test_several_requests_fill_a_machine_that_one_leaves_idle():
    """What was measured of batches is what is said of them; in between, by hand."""
    contexts = (16, 8000)
    by_rows = [(1, 1.0), (13, 1.0), (104, 2.0)]
    alone = [(1, [*zip(contexts, (1.0, 3.0))]), (13, [*zip(contexts, (1.0, 7.0))])]
    several = [(4, 6.0, 12.0), (8, 11.0, 18.0)]
    measured = dataclasses.replace(
        LONG_PAYS,
        full_by_rows=by_rows,
        full_by_tokens=alone,
        full_by_num_reqs=several,
        full_context=8000,
    )
    model = CostModel(measured)
    for count, seconds, longest in several:
        assert model.full_pass([1] * count, [8000] * count) == pytest.approx(seconds)
        assert model.full_pass([13] * count, [8000] * count) == pytest.approx(longest)
    # Alone a context adds 2 to a token; four add 5 together, eight 10.
    assert model.full_pass([1] * 6, [8000] * 6) == pytest.approx(1.0 + 7.5)
    # One that verifies, among eight, pays for it all.
    passes = interpolate(by_rows, 20) + 10.0 + 4.0
    assert model.full_pass([13] + [1] * 7, [8000] * 8) == pytest.approx(passes)
    assert model.full_pass([13], [8000]) == pytest.approx(7.0)
    # Beyond what was measured the machine is full; and noise makes nothing cheaper.
    assert model.attention_scales(64, 64) == (
        model.attention_scales(8, 8)[0],
        model.attention_scales(8, 8)[1],
    )
    falling = dataclasses.replace(measured, full_by_num_reqs=[(4, 6.0, 12.0), (8, 11.0, 11.5)])
    sums = [n * CostModel(falling).attention_scales(n, n)[1] for n in (1, 2, 4, 6, 8, 64)]
    assert sums == sorted(sums) and sums[0] == 1


def drawn_options(draw: random.Random, num_reqs: int, num_options: int) -> Options:
    shape = (num_reqs, num_options)
    return Options(
        lengths=np.array([[draw.randint(1, 16) for _ in range(num_options)]] * num_reqs),
        tokens=np.array([draw.uniform(0, 5) for _ in range(num_reqs * num_options)]).reshape(shape),
        seconds=np.array([draw.uniform(0.001, 3) for _ in range(num_reqs * num_options)]).reshape(
            shape
        ),
        is_possible=np.array([draw.random() < 0.8 for _ in range(num_reqs * num_options)]).reshape(
            shape
        ),
    )


@pytest.mark.parametrize("speculating", [0.0, 0.7])
def test_plan_finds_the_best_of_all_combinations(speculating):
    """Against trying every combination: tokens per second of the step are the same."""
    draw, plains, optimal = random.Random(1), 0, 0
    for _ in range(300):
        options = drawn_options(draw, draw.randint(1, 4), 3)
        plain = draw.uniform(0.5, 3)

        def speed(chosen, plain=plain, options=options):
            taken = [(row, column) for row, column in enumerate(chosen) if column >= 0]
            seconds = plain + bool(taken) * speculating + sum(options.seconds[at] for at in taken)
            tokens = [1 + options.tokens[at] for at in taken]
            return np.prod(tokens) ** (1 / (len(chosen) + 1)) / (seconds / plain)

        columns = [[-1, *np.flatnonzero(possible)] for possible in options.is_possible]
        found = plan(options, plain, speculating, num_plain=1)
        best = max(map(speed, itertools.product(*columns)))
        assert found.speedup == pytest.approx(speed(found.options)) and speed([-1]) == 1
        assert found.speedup >= 0.97 * best
        optimal += found.speedup >= best * (1 - 1e-9)
        plains += found.is_plain
    assert 10 < plains < 290 and optimal >= 295


def test_nobody_waits_long_for_one_that_is_predicted_well():
    """A proposal that triples one request's speed and halves that of seven others is not made; of
    two requests alone it is."""
    for num_others, wanted in ((7, [-1]), (1, [0])):
        options = Options(
            lengths=np.array([[8]]),
            tokens=np.array([[5.0]]),
            seconds=np.array([[1.0]]),
            is_possible=np.ones((1, 1), dtype=bool),
        )
        assert plan(options, 1.0, num_plain=num_others).options.tolist() == wanted


def test_a_gain_below_the_margin_is_not_taken():
    options = Options(
        lengths=np.array([[4, 8, 2]]),
        tokens=np.array([[3.9, 4.1, 1.5]]),
        seconds=np.array([[0.1, 0.1, 0.1]]),
        is_possible=np.ones((1, 3), dtype=bool),
    )
    assert plan(options, 1.0, margin=0.1).options.tolist() == [1]
    assert plan(options, 1.0, margin=5.0).is_plain


def test_options_are_what_the_parts_come_to():
    """A proposal's tokens and seconds against adding up its passes one by one."""
    model = CostModel(LONG_PAYS, per_draft={False: 1e-4}, begin_seconds=0.002)
    found = controller(LONG_PAYS)
    candidates = [
        Candidate("a", 30_000, 7, confidence=matched(2)),
        Candidate("b", 60_000, 16, is_greedy=False),
    ]
    rates = [found.acceptance.of(c.request_id, c.is_greedy) for c in candidates]
    rates[1].round_tokens = 3.0
    routes = {LEVELS: None, LOOKUP: SOURCES[1], DRAFT: SOURCES[0]}
    lengths = np.array([[1, 4, 0, 7], [1, 4, 16, 0]])
    costs = SharedCosts(token_s=1e-3, attention_scale=0.5, round_s=0.01, draft_s=0.0004)
    options = build_options(model, candidates, rates, lengths, costs, routes)
    seen = set()
    for row, column in zip(*np.nonzero(options.is_possible)):
        choice, candidate = options.choice(row, column), candidates[row]
        n = choice.num_tokens
        seen.add((candidate.request_id, choice.route, n))
        attention = model.attention_table([candidate.context], 17)[0]
        per_token = 1e-3 + (0 if candidate.is_greedy else 1e-4)
        seconds = n * per_token + 0.5 * (attention[n + 1] - attention[1])
        rate = {
            LEVELS: rates[row].level2,
            LOOKUP: rates[row].of(LOOKUP, False, 1),
            DRAFT: rates[row].of(DRAFT, False, 0),
        }[choice.route].value
        tokens = sum(rate**i for i in range(1, n + 1))
        if choice.route == LEVELS:
            seconds += 0.002 + n / rates[row].round_tokens * 0.01
        elif choice.route == DRAFT:
            seconds += n * 0.0004
        assert options.seconds[row, column] == pytest.approx(seconds)
        assert options.tokens[row, column] == pytest.approx(tokens)
    wanted = {("a", route, n) for route in routes for n in (1, 4, 7)}
    wanted |= {("b", route, n) for route in (LEVELS, DRAFT) for n in (1, 4, 16)}
    assert seen == wanted


def test_gamma_rises_with_acceptance_and_falls_with_the_drafts_price():
    def gamma(rate: float, max_tokens: int = 4, measured=LONG_PAYS, source=SOURCES[0]) -> int:
        source = dataclasses.replace(source, prior_acceptance=(rate,))
        acceptance = Acceptance([source])
        acceptance.of("a")
        config = TriForceConfig().with_defaults(can_adapt=True, model=DRAFT).resolve(32)
        lengths = DraftLengths(config, [source], acceptance)
        lengths.use_costs(CostModel(measured))
        return lengths.best("a", {source.name: 0}, 1, max_tokens)[1]

    gammas = [gamma(rate) for rate in (0.0, 0.5, 0.9, 0.99)]
    assert gammas == sorted(gammas) and gammas[0] == 0 and gammas[-1] == 4
    assert gamma(0.99, max_tokens=2) == 2
    dear = dataclasses.replace(LONG_PAYS, draft=0.1)
    assert gamma(0.9, measured=dear) == 0 and gamma(0.9, measured=dear, source=SOURCES[1]) == 4


def test_trials_have_a_share_of_the_time():
    budget, spent = TrialBudget(first_steps=1, max_steps=4), 0
    for _ in range(10_000):
        budget.earn(0.010, 0.010)
        spent += budget.spend(0.025)
    assert spent * 0.025 == pytest.approx(TRIAL_SHARE * 10_000 * 0.010, rel=0.05)
    budget.earn(1000, 0.010)
    assert budget.spend(0.040) and not budget.spend(0.001)
    assert not budget.covers(0.001) and budget.can_save(0.040) and not budget.can_save(0.041)
    budget.refund(1000)
    assert budget.covers(0.040) and not budget.covers(0.041)


def test_one_bad_request_proposes_next_to_nothing_the_others_do_not_mind():
    found = controller(LONG_PAYS, has_draft=False)
    good, bad = Candidate("good", 100_000, 16), Candidate("bad", 100_000, 16)
    found._trials.budget = TrialBudget(first_steps=0, max_steps=0)
    for _ in range(40):
        for request, choice in zip((good, bad), found.choose([good, bad])):
            right = choice.num_tokens * (request is good)
            found.observe_full_pass(request.request_id, choice.num_tokens, right)
    chosen = found.choose([good, bad])
    assert chosen[0].num_tokens > 4 and chosen[1].num_tokens <= 1


def test_nothing_pays_nothing_is_done():
    """No proposal, no trial, and rest: a batch that cannot win is not even looked at each step."""
    found = controller(NOTHING_PAYS)
    for _ in range(100):
        found.backoff.begin_step()
        if not found.backoff.is_resting:
            assert found.choose([Candidate("a", 4000, 16)]) == [PLAIN]
            assert found.backoff.is_resting


def accepted(draw: random.Random, rate: float, length: int) -> int:
    """Tokens before the first rejected one."""
    return next((i for i in range(length) if draw.random() >= rate), length)


@dataclass
class World:
    """A machine and a text: what really happens when the controller decides."""

    measured: Measurements
    level2: float
    """Level 3's acceptance of a token of level 2."""
    draft: float
    overhead: float = 0.002
    speculating: float = 0.0
    """Seconds that nothing foretells, of a step with drafts."""
    most: int = 16
    """Tokens of a proposal."""

    def decode(self, found: Controller, num_tokens: int, context: int, seed=0) -> float:
        """Tokens per second."""
        draw, truth = random.Random(seed), CostModel(self.measured)
        emitted, seconds = 0, 0.0

        while emitted < num_tokens:
            found.backoff.begin_step()
            choice, proposing = PLAIN, 0.0
            if not found.backoff.is_resting:
                most = min(self.most, found.config.num_speculative_tokens)
                choice = found.choose([Candidate("a", context + emitted, most)])[0]
            length = choice.num_tokens
            if choice.route == LEVELS:
                made = 0
                while made < length:
                    route, count = found.choose_draft("a", False, {}, 1, length - made - 1)
                    count = count if route == DRAFT else 0
                    level1 = count * truth.draft(1)
                    level2 = truth.level2(1, count + 1)
                    kept = accepted(draw, self.draft, count)
                    found.acceptance.observe_round("a", route, 0, count, kept)
                    found.measured.observe_round(
                        1, count, [count], count + 1, True, level1, level2, 0.0
                    )
                    made += kept + 1
                    proposing += level1 + level2
            elif choice.route == DRAFT:
                proposing = length * truth.draft(1)
            tokens, contexts = [1 + length], [context + emitted]
            step = truth.full_pass(tokens, contexts) + self.overhead
            step += self.speculating if length else 0.0
            taken = StepTime(True, tokens, contexts, step, length, proposing)
            if length or found.backoff.is_settled:
                found.observe_step(taken, found.take_plan())
            seconds += proposing + step
            rate = self.level2 if choice.route == LEVELS else self.draft * self.level2
            kept = accepted(draw, rate, length)
            if length:
                found.observe_full_pass("a", length, kept)
            emitted += kept + 1
        return emitted / seconds

    def decode_batch(
        self, found: Controller, size: int, num_steps: int, context: int, seed=0
    ) -> float:
        """Sampled requests of 128 tokens, one for each that leaves; times plain decoding's speed.
        Nothing is looked up, and deciding takes ``DECIDING``."""
        draw, truth = random.Random(seed), CostModel(self.measured)
        running: dict[str, int] = {}  # tokens that each has emitted
        num_begun, num_tokens, seconds, plain_seconds = 0, 0, 0.0, 0.0

        for _ in range(num_steps):
            found.backoff.begin_step()
            has_joined = len(running) < size
            while len(running) < size:
                running[str(num_begun)], num_begun = 0, num_begun + 1
            names = list(running)
            contexts = [context + running[name] for name in names]
            choices, proposing = dict.fromkeys(names, PLAIN), 0.0
            if has_joined:
                found.requests_joined()
            elif not found.backoff.is_resting:
                candidates = [
                    Candidate(n, at, 16, is_greedy=False, num_left=128 - running[n])
                    for n, at in zip(names, contexts)
                ]
                choices = dict(zip(names, found.choose(candidates)))
                proposing = DECIDING
            made = {n: 0 for n in names if choices[n].route == LEVELS}
            while some := [n for n in made if made[n] < choices[n].num_tokens]:
                counts = []
                for name in some:
                    most = choices[name].num_tokens - made[name] - 1
                    route, count = found.choose_draft(name, False, {}, len(some), most)
                    counts.append(count if route == DRAFT else 0)
                level1 = max(counts) * truth.draft(len(some))
                level2 = truth.level2(len(some), max(counts) + 1)
                for name, count in zip(some, counts):
                    kept = accepted(draw, self.draft, count)
                    source = DRAFT if count else None
                    found.acceptance.observe_round(name, source, 0, count, kept)
                    made[name] += kept + 1
                drafts, tests = [n for n in counts if n], sum(counts) + len(counts)
                found.measured.observe_round(
                    len(some), max(counts), drafts, tests, False, level1, level2, 0.0
                )
                proposing += level1 + level2
            direct = [c.num_tokens for c in choices.values() if c.route == DRAFT]
            proposing += max(direct, default=0) * truth.draft(len(direct))
            lengths = [choices[name].num_tokens for name in names]
            step = truth.full_pass([1 + n for n in lengths], contexts) + self.overhead
            step += self.speculating if any(lengths) else 0.0
            planned = found.take_plan()
            if any(lengths) or found.backoff.is_settled:
                tokens = [1 + n for n in lengths]
                taken = StepTime(False, tokens, contexts, step, sum(lengths), proposing)
                found.observe_step(taken, planned)
            seconds += step + proposing
            plain_seconds += truth.full_pass([1] * size, contexts) + self.overhead
            for name, length in zip(names, lengths):
                by_levels = choices[name].route == LEVELS
                kept = accepted(
                    draw, self.level2 if by_levels else self.draft * self.level2, length
                )
                if length:
                    found.observe_full_pass(name, length, kept)
                running[name] += kept + 1
                num_tokens += kept + 1
                if running[name] >= 128:
                    del running[name]
                    found.release(name)
        return num_tokens / seconds / (num_steps * size / plain_seconds)

    def plain(self, num_tokens: int, context: int) -> float:
        truth = CostModel(self.measured)
        steps = [truth.full_pass([1], [context + i]) + self.overhead for i in range(num_tokens)]
        return num_tokens / sum(steps)


@pytest.mark.parametrize("measured", [LONG_PAYS, NOTHING_PAYS], ids=["long pays", "nothing pays"])
@pytest.mark.parametrize("level2, draft", [(0.0, 0.0), (0.3, 0.2), (0.7, 0.5), (0.97, 0.6)])
@pytest.mark.parametrize("context", [500, 20_000, 100_000])
def test_never_slower_in_a_simulated_world(measured, level2, draft, context):
    """Whatever is accepted and whatever passes cost: at least 0.97 of plain decoding."""
    world = World(measured, level2, draft)
    found = world.decode(controller(measured), 4000, context)
    assert found >= 0.97 * world.plain(4000, context)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("context", [500, 8000, 60_000])
@pytest.mark.parametrize("level2, draft", [(0.0, 0.0), (0.3, 0.2), (0.6, 0.4)])
def test_a_new_engine_loses_little_where_requests_come_and_go(size, context, level2, draft):
    """Its first 500 steps, in which it finds out what is accepted, against plain decoding's."""
    world = World(SMALL_ON_CPU, level2, draft, overhead=0.0015, speculating=0.001)
    speeds = [world.decode_batch(controller(SMALL_ON_CPU), size, 500, context, s) for s in (0, 1)]
    assert np.mean(speeds) >= 0.97, speeds


@pytest.mark.parametrize(
    "size, context, level2, draft, wanted",
    [(4, 60_000, 0.6, 0.4, 1.3), (16, 8000, 0.8, 0.5, 1.2), (16, 60_000, 0.8, 0.5, 1.6)],
)
def test_a_batch_learns_what_pays_though_more_was_hoped_for(size, context, level2, draft, wanted):
    """Speculation by short proposals pays. What all requests together tried first, longer than
    paid, must not keep the batch from it (1.00, 1.00 and 1.23 times plain decoding where an engine
    begins with all that may be hoped for)."""
    world = World(SMALL_ON_CPU, level2, draft, overhead=0.0015, speculating=0.001)
    speeds = [world.decode_batch(controller(SMALL_ON_CPU), size, 300, context, s) for s in (0, 1)]
    assert np.mean(speeds) >= wanted, speeds


def test_trials_that_never_pay_take_their_share():
    """Requests that come and go, and nothing of their proposals is accepted."""
    world = World(SMALL_ON_CPU, 0.0, 0.0, overhead=0.0015, speculating=0.001)
    found = controller(SMALL_ON_CPU)
    world.decode_batch(found, 4, 1000, 60_000)
    assert 0.99 < world.decode_batch(found, 4, 2000, 60_000) < 1.0


@pytest.mark.parametrize("size", [4, 16])
def test_traffic_that_becomes_good_is_found_after_long_bad_traffic(size):
    """Behind the first 1,000 steps of good traffic, after 2,500 of bad."""
    found = controller(SMALL_ON_CPU)
    bad = World(SMALL_ON_CPU, 0.0, 0.0, overhead=0.0015, speculating=0.001)
    assert bad.decode_batch(found, size, 2500, 8000) >= 0.99
    good = dataclasses.replace(bad, level2=0.95, draft=0.6)
    assert good.decode_batch(found, size, 1000, 8000) >= 0.99
    assert good.decode_batch(found, size, 500, 8000) >= 1.2


def scarce_trials(least: float = 0.01) -> Controller:
    """There is time for one trial now and then, and of what is tried little is expected."""
    found = controller(LONG_PAYS, has_draft=False)
    found.acceptance.greedy.level2 = Rate(least, weight=50, memory=512)
    found._trials.budget = TrialBudget(first_steps=0.5, max_steps=0.5)
    return found


@pytest.mark.parametrize("is_verified", [True, False], ids=["in vain", "cut by a grammar"])
def test_who_gains_nothing_does_not_keep_the_others_from_their_turn(is_verified):
    """Four requests of which nothing is accepted: each of them gets as many trials as the others,
    wherever in the batch it is, and whether or not anything of its trials is verified."""
    found, trials = scarce_trials(), [0] * 4
    candidates = [Candidate(str(i), 100_000, 16) for i in range(4)]
    for _ in range(6000):
        found.backoff.begin_step()
        if found.backoff.is_resting:
            continue
        for row, choice in enumerate(found.choose(candidates)):
            if choice is not PLAIN:
                trials[row] += 1
                if is_verified or row:
                    found.observe_full_pass(str(row), choice.num_tokens, 0)
    assert min(trials) > 0 and max(trials) - min(trials) <= 2, trials


def test_those_who_come_anew_do_not_keep_one_that_stays_from_its_turn():
    """Beside one that stays there are always three that were not there ten decisions before."""
    found, trials, num_decisions = scarce_trials(), 0, 0
    for _ in range(12_000):
        found.backoff.begin_step()
        if found.backoff.is_resting:
            continue
        names = [f"{num_decisions // 10}-{i}" for i in range(3)]
        candidates = [Candidate(name, 100_000, 16) for name in [*names, "stays"]]
        for request, choice in zip(candidates, found.choose(candidates)):
            if choice is not PLAIN:
                trials += request.request_id == "stays"
                found.observe_full_pass(request.request_id, choice.num_tokens, 0)
        num_decisions += 1
        if num_decisions % 10 == 0:
            for name in names:
                found.release(name)
    assert found.num_requests == 4 or found.num_requests == 1
    assert trials >= 3


def test_trials_that_pay_do_not_go_on_where_the_batch_is_slower_by_them():
    """One request accepts everything, fifteen may not be tried (they have seeds, and contexts too
    short for them): the plan refuses, and in the long run trials, all of them accepted, take no
    more than two shares of the time, one for what is tried and one for what looked good."""
    found = controller(LONG_PAYS, has_draft=False)
    truth, context = found.measured.copy(), 6000
    seeded = [Candidate(str(i), context, 16, has_seed=True) for i in range(15)]
    candidates = [*seeded, Candidate("good", context, 16)]
    found.acceptance.of("good").level2 = Rate(0.05, weight=200, memory=1000)
    plain = truth.full_pass([1] * 16, [context] * 16)
    num_steps, num_trials, lost = 20_000, 0, 0.0
    for _ in range(num_steps):
        found.backoff.begin_step()
        if found.backoff.is_resting:
            continue
        choice = found.choose(candidates)[15]
        if choice is not PLAIN:
            num_trials += 1
            rounds = choice.num_tokens / 2 * truth.round_seconds(1, 0)
            lost += rounds + truth.full_pass([1] * 15 + [1 + choice.num_tokens], [context] * 16)
            lost -= plain * (1 + choice.num_tokens) ** (1 / 16)
            found.observe_full_pass("good", choice.num_tokens, choice.num_tokens)
            found.acceptance.of("good").level2 = Rate(0.05, weight=200, memory=1000)
    assert num_trials > 0
    assert lost <= 2.2 * TRIAL_SHARE * num_steps * plain, (num_trials, lost / num_steps / plain)


def routes_taken(found, rates: dict[Route, float], match_length: int, context: int) -> list[Route]:
    """By four requests of a hundred steps each at a time, in the second half of 2,000 steps."""
    routes, draw = [], random.Random(0)
    for step in range(2000):
        found.backoff.begin_step()
        names = [f"{step // 100}-{i}" for i in range(4)]
        if step % 100 == 0:
            found.requests_joined()
        if found.backoff.is_resting:
            continue
        candidates = [Candidate(n, context, 16, confidence=matched(match_length)) for n in names]
        for name, choice in zip(names, found.choose(candidates)):
            routes.append(choice.route)
            if choice is not PLAIN:
                kept = accepted(draw, rates[choice.route], choice.num_tokens)
                found.observe_full_pass(name, choice.num_tokens, kept)
        if step % 100 == 99:
            for name in names:
                found.release(name)
    return routes[len(routes) // 2 :]


@pytest.mark.parametrize("level2, is_better", [(0.97, True), (0.1, False)])
def test_a_better_route_than_one_that_pays_is_found(level2, is_better):
    """Looked-up tokens pay for everybody, and level 2's are thought little of after a bad start:
    they are tried, taken where they gain more, and tried seldom where they do not."""
    found = controller(LONG_PAYS, has_draft=False)
    found.acceptance.greedy.level2 = Rate(0.3, weight=8, memory=512)
    late = routes_taken(found, {LEVELS: level2, LOOKUP: 0.6}, 4, 100_000)
    share = late.count(LEVELS) / len(late)
    assert late.count(PLAIN_ROUTE) < 0.1 * len(late)
    assert share > 0.8 if is_better else 0 < share < 0.02, share


def test_a_trial_of_one_that_speculates_is_charged_what_it_would_have_gained():
    """Long matches that are always wrong take next to no time to try, beside level 2's tokens
    that are right: every fourth decision went to them where only their time was charged."""
    found = controller(LONG_PAYS, has_draft=False)
    late = routes_taken(found, {LEVELS: 0.97, LOOKUP: 0.0}, 8, 20_000)
    assert late.count(LEVELS) > 0.97 * len(late), Counter(late)


def test_a_window_that_the_draft_reads_again_is_not_taken_for_a_cost_of_speculating():
    """A request that drafts seldom has the draft read what it missed, each time; the plan knows."""
    found = controller(LONG_PAYS)
    found.planned = Planned(num_drafts=4, seconds=0.01)
    found.reads_window(200)
    assert found.take_plan().seconds == pytest.approx(0.01 + found.model.reading_window(200))
    found.reads_window(200)
    assert found.take_plan() is None


@pytest.mark.parametrize("speculating", [0.02, 0.1])
def test_a_cost_that_nothing_foretells_is_found(speculating):
    """Steps with drafts take longer than all their parts: noticed, and speculation given up."""
    world = World(LONG_PAYS, 0.6, 0.4, speculating=speculating)
    found = world.decode(controller(LONG_PAYS), 4000, 20_000)
    assert found >= 0.97 * world.plain(4000, 20_000)


def test_plain_steps_that_became_faster_are_noticed():
    """What speculation is compared with changes while everything is speculated on."""
    found = controller(LONG_PAYS)
    World(LONG_PAYS, 0.97, 0.6, overhead=0.05).decode(found, 2000, 100_000)
    slow = found.measured.overhead(1)
    fast = World(LONG_PAYS, 0.97, 0.6, overhead=0.0)
    assert fast.decode(found, 8000, 100_000) > 1.5 * fast.plain(8000, 100_000)
    assert slow == pytest.approx(0.05) and found.measured.overhead(1) < 0.04


@pytest.mark.parametrize("level2, draft", [(0.8, 0.3), (0.95, 0.5), (0.99, 0.8)])
def test_as_fast_as_the_best_fixed_setting(level2, draft):
    """Against every fixed length and gamma, each with its own run of the same world."""
    world = World(LONG_PAYS, level2, draft)
    fixed = {
        (length, gamma): world.decode(
            controller(LONG_PAYS, num_speculative_tokens=length, gamma=gamma, min_context=0),
            4000,
            100_000,
        )
        for length in (2, 4, 6, 10, 16)
        for gamma in (1, 2, 4)
    }
    chosen = world.decode(controller(LONG_PAYS), 4000, 100_000)
    assert chosen >= 0.92 * max(fixed.values()), fixed


# An 8B model whose KV lies in host memory: 12 GB cross PCIe for each full pass at 100,000 tokens.
OVER_HOST = Measurements(
    full_by_rows=[(1, 0.018), (16, 0.019), (128, 0.025)],
    full_by_tokens=[(1, [(16, 0.018), (100_000, 0.470)]), (33, [(16, 0.020), (100_000, 0.480)])],
    level2_by_tokens=[(1, 0.019), (5, 0.0195)],
    level2_per_row=0.0005,
    draft=0.001,
)


def test_where_a_full_pass_is_dear_proposals_are_as_long_as_they_may_be():
    """Of a good text; of a poor one they are as short as before."""
    good, poor = World(OVER_HOST, 0.985, 0.5, most=32), World(OVER_HOST, 0.5, 0.3, most=32)
    for world, is_longer in ((good, True), (poor, False)):
        by_length = {
            n: world.decode(
                controller(OVER_HOST, num_speculative_tokens=n, gamma=2, min_context=0),
                4000,
                100_000,
            )
            for n in (6, 16, 32)
        }
        assert (by_length[32] > 1.2 * by_length[16]) == is_longer, by_length
        chosen = world.decode(controller(OVER_HOST, gamma=2), 4000, 100_000)
        assert chosen >= 0.92 * max(by_length.values()), by_length


def test_a_text_that_changes_is_noticed():
    """Acceptance that breaks off and comes back: plain decoding between, speculation after."""
    found = controller(LONG_PAYS)
    good, bad = World(LONG_PAYS, 0.98, 0.6), World(LONG_PAYS, 0.0, 0.0)
    assert good.decode(found, 2000, 100_000) > 1.5 * good.plain(2000, 100_000)
    assert bad.decode(found, 4000, 100_000) > 0.97 * bad.plain(4000, 100_000)
    assert good.decode(found, 4000, 100_000) > 1.4 * good.plain(4000, 100_000)


def test_what_was_given_is_not_chosen():
    found = controller(NOTHING_PAYS, num_speculative_tokens=5, gamma=3, min_context=0)
    assert found.choose([Candidate("a", 10, 5)]) == [Choice(LEVELS, 5)]
    assert found.choose_draft("a", False, matched(4), 1, 4) == (DRAFT, 3)
    by_length = controller(NOTHING_PAYS, num_speculative_tokens=5)
    assert by_length.choose([Candidate("a", 10, 5)]) == [PLAIN]


def test_a_seeded_request_does_not_depend_on_times():
    """The same decisions on a fast and a slow machine, before and after anything was measured."""
    seeded = Candidate("a", 20_000, 16, confidence=matched(5), has_seed=True)
    found = set()
    for measured in (LONG_PAYS, NOTHING_PAYS):
        one = controller(measured)
        for _ in range(3):
            found.add((one.choose([seeded])[0], one.choose_draft("a", True, matched(5), 1, 15)))
            one.observe_full_pass("a", 6, 0)
            one.observe_step(StepTime(True, [7], [20_000], 1.0, 6), one.take_plan())
    assert found == {(Choice(LEVELS, 6), (DRAFT, 2))}
    assert one.choose([Candidate("b", 8000, 16, has_seed=True)]) == [PLAIN]  # below twice 4096
    given = controller(LONG_PAYS, gamma=3)
    assert given.choose_draft("a", True, matched(5), 1, 15) == (
        DRAFT,
        3,
    )  # a given value is not changed


def test_no_rest_puts_off_a_seeded_request():
    """It begins at its context, whatever a rest of the batch would be."""
    found = controller(NOTHING_PAYS)
    found.backoff.begin_step()
    assert found.choose([Candidate("a", 8190, 16, has_seed=True)]) == [PLAIN]
    found.backoff.begin_step()
    assert found.backoff.is_resting  # one token is still missing
    found.backoff.begin_step()
    assert not found.backoff.is_resting


def test_ranks_decide_alike_though_their_clocks_differ():
    box = {}

    def adopt(rank, mine):
        if rank == 0:
            box["model"] = copy.deepcopy(mine)  # as a broadcast does
        return box["model"]

    ranks = []
    for rank, measured in enumerate((LONG_PAYS, NOTHING_PAYS)):
        one = Controller(
            TriForceConfig().with_defaults(can_adapt=True, model=DRAFT).resolve(32), SOURCES
        )
        one.start(CostModel(measured), adopt=lambda mine, rank=rank: adopt(rank, mine))
        ranks.append(one)
    draw = random.Random(3)
    for step in range(200):
        decided = []
        accepted = draw.randint(0, 16)
        for rank, one in enumerate(ranks):
            one.backoff.begin_step()
            found = matched(step % 3)
            choice = one.choose([Candidate("a", 30_000 + step, 16, confidence=found)])
            decided.append(
                (choice, one.choose_draft("a", False, found, 1, 9), one.backoff.is_resting)
            )
            one.observe_full_pass("a", 16, accepted)
            one.measured.observe_round(1, 3, [2], 4, True, 0.01 * (rank + 1), 0.02, 0.0)
            slow = 0.05 * (1 + rank * draw.random())
            one.observe_step(StepTime(True, [17], [30_000], slow, 16), one.take_plan())
        assert decided[0] == decided[1]


def test_measured_times_replace_the_prediction():
    """A machine that is three times slower at level 2 than at start-up is noticed."""
    model = CostModel(LONG_PAYS)
    before = model.level2(1, 3)
    for _ in range(100):
        model.observe("level 2", model.level2(1, 3), 3 * before)
        model.observe_step(StepTime(True, [1], [16], 0.030))
        model.observe_step(StepTime(True, [7], [16], 0.005, num_drafts=6))
    assert model.level2(1, 3) == pytest.approx(3 * before, rel=0.05)
    assert model.overhead(1) > 0.015
    assert model.full_pass([7], [16]) <= 0.0065  # faster than measured at start-up


@pytest.mark.parametrize("num_drafts", [0, 6])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_pause_is_not_taken_for_a_steps_time(num_drafts, is_known):
    """The engine stood still for a minute between two steps: what is known of steps hardly moves,
    and what is first known of them is no minute either."""
    model = CostModel(LONG_PAYS)
    contexts, tokens = [4000], [1 + num_drafts]
    usual = model.full_pass(tokens, contexts) + 0.002
    if is_known:
        for _ in range(50):
            model.observe_step(
                StepTime(True, [1], contexts, model.full_pass([1], contexts) + 0.002)
            )
    before = model.overhead(1)
    model.observe_step(StepTime(True, tokens, contexts, 60.0 + usual, num_drafts))
    assert model.overhead(1) < before + 0.2 * usual if is_known else model.overhead(1) <= 3 * usual
    assert model.speculating_seconds(1, True) < 0.2 * usual


def test_a_machine_that_stays_slower_is_believed():
    model = CostModel(LONG_PAYS)
    for _ in range(40):
        model.observe_step(StepTime(True, [1], [4000], 0.2))
    assert model.overhead(1) == pytest.approx(0.2 - model.full_pass([1], [4000]), rel=0.05)


def test_a_trial_bears_what_speculating_takes_besides():
    """Where nobody speculates, the step that verifies a trial and the re-evaluation after it are
    its own: in the long run trials take their share of the time with all that (without it, 14 times
    it)."""
    found = controller(LONG_PAYS, has_draft=False)
    contexts = [500] * 4
    plain = found.measured.full_pass([1] * 4, contexts)
    for _ in range(50):
        found.measured.observe_step(
            StepTime(True, [1] * 4, contexts, 1.1 * plain, is_reevaluation=True)
        )
    found.measured.speculating[3, True] = fixed = 0.2 * plain
    # Next to nothing is accepted, and much could be gained if it were.
    engine = found.acceptance.greedy
    engine.level2 = Rate(0.01, weight=50, memory=512)
    engine.level1[LOOKUP, False] = [Rate(0.01, weight=50, memory=512) for _ in range(8)]
    found.start(found.measured)
    around = fixed + found.model.reevaluation_seconds(4, True)
    num_trials, num_steps = 0, 6000
    for _ in range(num_steps):
        found.backoff.begin_step()
        if not found.backoff.is_resting:
            candidates = [Candidate(str(i), 500, 16, confidence=matched(8)) for i in range(4)]
            num_trials += any(choice is not PLAIN for choice in found.choose(candidates))
    assert 0.5 < num_trials * around / (TRIAL_SHARE * num_steps * plain) < 1.3
