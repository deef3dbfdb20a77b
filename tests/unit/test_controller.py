"""Promise: the controller takes what is fastest by what it measured, and never pays for a guess."""

import copy
import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.worlds import (
    DRAFT,
    LONG_PAYS,
    LOOKUP,
    NOTHING_PAYS,
    OVER_HOST,
    SMALL_ON_CPU,
    SOURCES,
    World,
    accepted,
    controller,
    matched,
)
from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import (
    PLAIN,
    Candidate,
    Choice,
    Controller,
    CostModel,
    StepTime,
    exploration,
)
from vllm_triforce.controller.acceptance import Rate
from vllm_triforce.controller.controller import Planned
from vllm_triforce.controller.exploration import TRIAL_SHARE
from vllm_triforce.controller.measurements import interpolate
from vllm_triforce.controller.planner import build_options
from vllm_triforce.controller.routes import HIERARCHICAL, PLAIN_ROUTE, Route
from vllm_triforce.runner_v1 import calibration

ON_CPU = World(SMALL_ON_CPU, 0.0, 0.0, overhead=0.0015, speculating=0.001, deciding=0.0015)


def test_interpolation():
    points = [(1, 10.0), (3, 20.0), (5, 60.0)]
    wanted = {0: 10, 1: 10, 2: 15, 3: 20, 4: 40, 5: 60, 6: 80}
    assert {x: interpolate(points, x) for x in wanted} == wanted
    assert interpolate([(4, 7.0)], 100) == 7


def test_attention_is_interpolated_between_measurements():
    """Compare with interpolation by hand, one pass at a time."""
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


@pytest.mark.parametrize(
    "longest, seconds, lengths, contexts",
    [
        (20_000, 0.1, 14, [16, 2048, 16_384, 20_000]),
        (30_000, 0.3, 6, [16, 2048, 16_384, 30_000]),
        (30_000, 0.8, 4, [16, 30_000]),
        (2048, 9.0, 2, [16, 2048]),
    ],
)
def test_a_slow_model_is_measured_at_a_few_lengths(
    longest, seconds, lengths, contexts, monkeypatch
):
    """A second token may cost more than the next six, attention between contexts is a line."""
    monkeypatch.setattr(calibration, "_MAX_SECONDS", 8.0)  # less in tests
    made: Any = SimpleNamespace(_longest_pass=lambda: (longest, seconds), _length=32)
    tokens, found = calibration.Calibration._full_pass_shapes(made)
    assert len(tokens) == lengths and found == contexts
    assert {1, 33} <= {*tokens} and (lengths == 2 or {2, 8} < {*tokens})


def test_several_requests_fill_a_machine_that_one_leaves_idle():
    """Measured batches cost as measured; others are interpolated."""
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
    # Beyond the measurements the machine is full; and noise makes nothing cheaper.
    assert [*model.attention_scales(64, 64)] == [*model.attention_scales(8, 8)]
    falling = dataclasses.replace(measured, full_by_num_reqs=[(4, 6.0, 12.0), (8, 11.0, 11.5)])
    sums = [n * CostModel(falling).attention_scales(n, n)[1] for n in (1, 2, 4, 6, 8, 64)]
    assert sums == sorted(sums) and sums[0] == 1


def test_options_add_up_their_passes(monkeypatch):
    """Compare a proposal's tokens and seconds with the sum of its passes."""
    model = CostModel(LONG_PAYS)
    monkeypatch.setattr(model, "attention_scales", lambda num_reqs, num_verifying: (1.0, 0.5))
    found = controller(LONG_PAYS)
    candidates = [
        Candidate("a", 30_000, 7, match_classes=matched(2)),
        Candidate("b", 60_000, 16, is_greedy=False),
    ]
    rates = [found.acceptance.of(c.request_id, c.is_greedy) for c in candidates]
    rates[1].round_tokens = 3.0
    routes = {HIERARCHICAL: None, LOOKUP: SOURCES[1], DRAFT: SOURCES[0]}
    lengths = np.array([[1, 4, 0, 7], [1, 4, 16, 0]])
    options = build_options(model, candidates, rates, lengths, routes, num_plain=1)
    seen = set()
    for row, column in zip(*np.nonzero(options.is_possible)):
        choice, candidate = options.choice(row, column), candidates[row]
        n = choice.num_tokens
        seen.add((candidate.request_id, choice.route, n))
        attention = model.attention_table([candidate.context], 17)[0]
        seconds = (model.rows(3 * (n + 1)) - model.rows(3)) / 3
        seconds += 0.5 * (attention[n + 1] - attention[1])
        # The match of two tokens grows by each that is accepted, up to the class of eight.
        by_place = {
            HIERARCHICAL: [rates[row].level2] * n,
            LOOKUP: [rates[row].of(LOOKUP, False, min(1 + i, 7)) for i in range(n)],
            DRAFT: [rates[row].of(DRAFT, False, 0)] * n,
        }[choice.route]
        tokens = sum(math.prod(rate.value for rate in by_place[:i]) for i in range(1, n + 1))
        if choice.route == HIERARCHICAL:
            seconds += n / rates[row].round_tokens * model.round_seconds(2, candidate.context) / 2
        elif choice.route == DRAFT:
            seconds += n * model.draft(2) / 2
        assert options.seconds[row, column] == pytest.approx(seconds)
        assert options.tokens[row, column] == pytest.approx(tokens)
    wanted = {("a", route, n) for route in routes for n in (1, 4, 7)}
    wanted |= {("b", route, n) for route in (HIERARCHICAL, DRAFT) for n in (1, 4, 16)}
    assert seen == wanted


@pytest.mark.parametrize("measured", [LONG_PAYS, NOTHING_PAYS], ids=["long pays", "nothing pays"])
@pytest.mark.parametrize("level2, draft", [(0.0, 0.0), (0.3, 0.2), (0.7, 0.5), (0.97, 0.6)])
@pytest.mark.parametrize("context", [500, 100_000])
def test_never_slower_in_a_simulated_world(measured, level2, draft, context):
    assert World(measured, level2, draft).decode(controller(measured), 1500, context) >= 0.97


@pytest.mark.parametrize(
    "size, context, level2, draft, wanted",
    [
        (4, 500, 0.0, 0.0, 0.97),
        (4, 60_000, 0.3, 0.2, 0.97),
        (16, 500, 0.3, 0.2, 0.97),
        (16, 8000, 0.0, 0.0, 0.97),
        (16, 60_000, 0.6, 0.4, 0.97),
        # Short proposals pay; all requests together first try longer ones, which do not.
        (4, 60_000, 0.6, 0.4, 1.3),
        (16, 8000, 0.8, 0.5, 1.2),
        (16, 60_000, 0.8, 0.5, 1.6),
    ],
)
def test_a_new_engine_soon_finds_the_proposals_that_pay(size, context, level2, draft, wanted):
    """Measure the first 400 steps, while requests come and go."""
    world = dataclasses.replace(ON_CPU, level2=level2, draft=draft)
    speeds = [
        world.decode(controller(SMALL_ON_CPU), 400, context, size, length=128, seed=seed)
        for seed in (0, 1)
    ]
    assert np.mean(speeds) >= wanted, speeds


@pytest.mark.parametrize("size", [4, 16])
def test_trials_take_their_share_and_find_traffic_that_becomes_good(size):
    """Traffic is bad for 2,500 steps, then good; requests come and go."""
    found = controller(SMALL_ON_CPU)
    ON_CPU.decode(found, 1000, 8000, size, length=128)
    assert 0.99 < ON_CPU.decode(found, 1500, 8000, size, length=128) < 1.0
    good = dataclasses.replace(ON_CPU, level2=0.95, draft=0.6)
    assert good.decode(found, 1000, 8000, size, length=128) >= 0.99
    assert good.decode(found, 500, 8000, size, length=128) >= 1.2


def deciding_steps(found: Controller, num_steps: int) -> Iterator[int]:
    """Yield the steps in which a controller decides."""
    for step in range(num_steps):
        found.backoff.begin_step()
        if not found.backoff.is_resting:
            yield step


def test_new_requests_do_not_delay_the_trial_of_an_old_one(monkeypatch):
    """Three of four requests are replaced every ten decisions; there is time for few trials."""
    monkeypatch.setattr(exploration, "MAX_TRIAL_STEPS", 0.5)
    found, num_trials = controller(LONG_PAYS, has_draft=False), 0
    found.acceptance.greedy.level2 = Rate(0.01, weight=50, memory=512)
    for num_decisions, _ in enumerate(deciding_steps(found, 12_000)):
        names = [f"{num_decisions // 10}-{i}" for i in range(3)]
        candidates = [Candidate(name, 100_000, 16) for name in [*names, "stays"]]
        for request, choice in zip(candidates, found.choose(candidates)):
            if choice is not PLAIN:
                num_trials += request.request_id == "stays"
                found.observe_full_pass(request.request_id, choice.num_tokens, 0)
        if num_decisions % 10 == 9:
            for name in names:
                found.release(name)
    assert found.num_requests == 4 or found.num_requests == 1
    assert num_trials >= 3


def test_trials_that_pay_do_not_go_on_where_the_batch_is_slower_by_them():
    """One request accepts everything, and fifteen seeded ones may not be tried."""
    found = controller(LONG_PAYS, has_draft=False)
    truth, context = found.measured.copy(), 6000
    seeded = [Candidate(str(i), context, 16, has_seed=True) for i in range(15)]
    candidates = [*seeded, Candidate("good", context, 16)]
    found.acceptance.of("good").level2 = Rate(0.05, weight=200, memory=1000)
    plain = truth.full_pass([1] * 16, [context] * 16)
    num_steps, num_trials, lost = 20_000, 0, 0.0
    for _ in deciding_steps(found, num_steps):
        choice = found.choose(candidates)[15]
        if choice is not PLAIN:
            num_trials += 1
            rounds = choice.num_tokens / 2 * truth.round_seconds(1)
            lost += rounds + truth.full_pass([1] * 15 + [1 + choice.num_tokens], [context] * 16)
            lost -= plain * (1 + choice.num_tokens) ** (1 / 16)
            found.observe_full_pass("good", choice.num_tokens, choice.num_tokens)
            found.acceptance.of("good").level2 = Rate(0.05, weight=200, memory=1000)
    assert num_trials > 0
    assert lost <= 2.2 * TRIAL_SHARE * num_steps * plain, (num_trials, lost / num_steps / plain)


def routes_taken(found, rates: dict[Route, float], match_length: int, context: int) -> list[Route]:
    """Return the choices of four requests at a time, in the second half of 2,000 steps."""
    routes, draw = [], random.Random(0)
    for step in range(2000):
        found.backoff.begin_step()
        names = [f"{step // 100}-{i}" for i in range(4)]
        if step % 100 == 0:
            found.requests_joined()
        if found.backoff.is_resting:
            continue
        candidates = [Candidate(n, context, 16, match_classes=matched(match_length)) for n in names]
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
    """Prompt lookup pays, and level 2 had a bad start."""
    found = controller(LONG_PAYS, has_draft=False)
    found.acceptance.greedy.level2 = Rate(0.3, weight=8, memory=512)
    late = routes_taken(found, {HIERARCHICAL: level2, LOOKUP: 0.6}, 4, 100_000)
    share = late.count(HIERARCHICAL) / len(late)
    assert late.count(PLAIN_ROUTE) < 0.1 * len(late)
    assert share > 0.8 if is_better else 0 < share < 0.02, share


def test_a_trial_is_charged_the_tokens_of_the_present_route():
    """Wrong matches take no time, but cost the tokens of the present route."""
    found = controller(LONG_PAYS, has_draft=False)
    late = routes_taken(found, {HIERARCHICAL: 0.97, LOOKUP: 0.0}, 8, 20_000)
    assert late.count(HIERARCHICAL) > 0.97 * len(late), Counter(late)


def test_the_test_of_a_sampled_token_has_its_price():
    """With a large vocabulary the tests of long drafts take longer than their passes."""
    choices = {}
    for is_greedy, test_s in itertools.product((True, False), (0.0, 0.003)):
        found = controller(dataclasses.replace(SMALL_ON_CPU, test_per_token=test_s), False)
        candidate = Candidate("r", 8000, 32, matched(8), is_greedy=is_greedy)
        choices[is_greedy, test_s] = found.choose([candidate])[0]
        seconds = found.model.verification([8000], [is_greedy], 1, 32)[0]
        unpriced = found.model.verification([8000], [True], 1, 32)[0]
        assert seconds - unpriced == pytest.approx(0.0 if is_greedy else test_s * np.arange(33))
    assert choices[True, 0.003] == choices[True, 0.0] == choices[False, 0.0] != PLAIN
    assert choices[False, 0.003].num_tokens < choices[False, 0.0].num_tokens


def test_start_up_times_the_test_of_a_sampled_token(monkeypatch):
    made, tested = object.__new__(calibration.Calibration), []

    def timed(runs: dict) -> dict:
        for run in runs.values():
            run()
        return {count: 0.01 + 0.002 * count for count in runs}

    made._length, made._timer = 16, SimpleNamespace(all_seconds=timed)
    config = SimpleNamespace(get_vocab_size=lambda: 100)
    made._vllm_config = SimpleNamespace(model_config=config)
    monkeypatch.setattr(calibration, "rejection_sample", lambda *args: tested.append(args))
    assert made._test_per_token() == pytest.approx(0.002)
    assert [args[1] for args in tested] == [[1], [16]]
    assert all(args[5].shape == (args[2], 100) and args[7].all_random for args in tested)


@pytest.mark.parametrize("speculating", [0.02, 0.1])
def test_a_cost_that_nothing_foretells_is_found(speculating):
    """Speculation is given up where steps with drafts take longer than their parts."""
    world = World(LONG_PAYS, 0.6, 0.4, speculating=speculating)
    speeds = [world.decode(controller(LONG_PAYS), 1500, 20_000, seed=seed) for seed in range(4)]
    assert min(speeds) >= 0.96


def test_the_break_even_is_of_requests_that_propose():
    """Two of four requests propose, and all wait 15 ms in place of 10: each of the two has to gain
    a whole token."""
    step = StepTime(True, [7, 7, 1, 1], [1000] * 4, 0.0, num_drafts=12, num_verifying=2)
    assert step.break_even(0.015, 0.010) == pytest.approx((0.040, 0.020))
    # A proposal that came to nothing costs time all the same.
    step = StepTime(True, [7], [1000], 0.0, num_drafts=6)
    assert step.break_even(0.015, 0.010) == pytest.approx((0.005, 0.0))


def test_break_even_counters_rise_where_start_up_was_too_slow():
    """An overhead learned from long contexts is negative, and exceeds a short context's pass."""
    found, counted = controller(LONG_PAYS), []
    found._count_step = lambda *seconds: counted.extend(seconds)
    for _ in range(40):
        long_s = CostModel(LONG_PAYS).full_pass([1], [100_000])
        found.observe_step(StepTime(True, [1], [100_000], long_s / 2), None)
    found.measured.overheads = {key: -0.02 for key in found.measured.overheads}
    found.observe_step(StepTime(True, [7], [500], 0.014, 6, num_verifying=1), Planned(6, 0.0))
    assert len(counted) == 2 and min(counted) > 0


def test_plain_steps_that_became_faster_are_noticed():
    """The baseline changes while everything is speculated on."""
    found = controller(LONG_PAYS)
    World(LONG_PAYS, 0.97, 0.6, overhead=0.05).decode(found, 200, 100_000)
    slow = found.measured.overhead(1)
    assert World(LONG_PAYS, 0.97, 0.6, overhead=0.0).decode(found, 800, 100_000) > 1.5
    assert slow == pytest.approx(0.05) and found.measured.overhead(1) < 0.04


def fixed_speeds(world: World, lengths: tuple, gammas: tuple) -> dict[tuple[int, int], float]:
    """Return the speed of each fixed length and gamma."""
    speeds = {}
    for length, gamma in itertools.product(lengths, gammas):
        keys = dict(num_speculative_tokens=length, gamma=gamma, min_context=0)
        speeds[length, gamma] = world.decode(controller(world.measured, **keys), 300, 100_000)
    return speeds


@pytest.mark.parametrize(
    "level2, draft", [(0.8, 0.3), (0.99, 0.8), pytest.param(0.95, 0.5, marks=pytest.mark.thorough)]
)
def test_as_fast_as_the_best_fixed_setting(level2, draft):
    world = World(LONG_PAYS, level2, draft)
    fixed = fixed_speeds(world, (4, 8, 16), (1, 2, 4))
    assert world.decode(controller(LONG_PAYS), 600, 100_000) >= 0.92 * max(fixed.values()), fixed


@pytest.mark.parametrize("level2, draft, is_longer", [(0.985, 0.5, True), (0.5, 0.3, False)])
def test_where_a_full_pass_is_dear_proposals_are_as_long_as_they_may_be(level2, draft, is_longer):
    world = World(OVER_HOST, level2, draft, max_tokens=32)
    fixed = fixed_speeds(world, (6, 16, 32), (2,))
    assert (fixed[32, 2] > 1.2 * fixed[16, 2]) == is_longer, fixed
    chosen = world.decode(controller(OVER_HOST, gamma=2), 600, 100_000)
    assert chosen >= 0.92 * max(fixed.values()), fixed


def test_given_values_are_not_chosen():
    found = controller(NOTHING_PAYS, num_speculative_tokens=5, gamma=3, min_context=0)
    assert found.choose([Candidate("a", 10, 5)]) == [Choice(HIERARCHICAL, 5, 3)]
    assert found.choose_draft("a", False, matched(4), 1, 4) == (DRAFT, 3)
    by_length = controller(NOTHING_PAYS, num_speculative_tokens=5)
    assert by_length.choose([Candidate("a", 10, 5)]) == [PLAIN]


def test_without_level2_a_source_is_chosen():
    """The draft where nothing matches; prompt lookup, which takes no pass, by a long match."""
    found = controller(LONG_PAYS, levels="1,3")
    assert [c.route for c in found.choose([Candidate("a", 50_000, 8)])] == [DRAFT]
    matching = Candidate("b", 50_000, 8, matched(8))
    assert [c.route for c in found.choose([matching])] == [LOOKUP]


def test_a_seeded_request_does_not_depend_on_times():
    """Decide alike on a fast and a slow machine."""
    seeded = Candidate("a", 20_000, 16, match_classes=matched(5), has_seed=True)
    found = set()
    for measured in (LONG_PAYS, NOTHING_PAYS):
        one = controller(measured)
        for _ in range(3):
            found.add((one.choose([seeded])[0], one.choose_draft("a", True, matched(5), 1, 15)))
            one.observe_full_pass("a", 6, 0)
            one.observe_step(StepTime(True, [7], [20_000], 1.0, 6), one.take_plan())
    assert found == {(Choice(HIERARCHICAL, 6, 3), (DRAFT, 2))}
    assert one.choose([Candidate("b", 8000, 16, has_seed=True)]) == [PLAIN]  # below twice 4096
    given = controller(LONG_PAYS, gamma=3)
    assert given.choose_draft("a", True, matched(5), 1, 15) == (DRAFT, 3), "not changed"


@pytest.mark.parametrize("has_seed", [False, True])
def test_no_rest_puts_off_a_seeded_request(has_seed):
    """It begins at its context, however long the batch would rest."""
    found = controller(NOTHING_PAYS)
    found.backoff.begin_step()
    assert found.choose([Candidate("a", 8190, 16, has_seed=has_seed)]) == [PLAIN]
    found.backoff.begin_step()
    assert found.backoff.is_resting  # one token is still missing
    found.backoff.begin_step()
    assert found.backoff.is_resting is not has_seed


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
            choice = one.choose([Candidate("a", 30_000 + step, 16, match_classes=found)])
            decided.append(
                (choice, one.choose_draft("a", False, found, 1, 9), one.backoff.is_resting)
            )
            one.observe_full_pass("a", 16, accepted)
            one.measured.observe_level1(0.01, 0.01 * (rank + 1))
            one.measured.observe_level2(1, 4, 0, 0.02)
            slow = 0.05 * (1 + rank * draw.random())
            one.observe_step(StepTime(True, [17], [30_000], slow, 16), one.take_plan())
        assert decided[0] == decided[1]


@pytest.mark.parametrize("num_drafts", [0, 6])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_pause_is_not_taken_for_a_steps_time(num_drafts, is_known):
    """The engine stands still for a minute between two steps."""
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


def test_a_plain_pass_that_was_measured_too_slow_does_not_make_everything_pay():
    """Another process ran while the engine measured its plain pass, and none while it measured
    others. Proposals lose a fifth."""
    measured, factor = SMALL_ON_CPU, 1.7
    slow = dataclasses.replace(
        measured,
        full_by_rows=[(n, s * (factor if n == 1 else 1)) for n, s in measured.full_by_rows],
        full_by_tokens=[
            (n, [(at, s * (factor if n == 1 else 1)) for at, s in points])
            for n, points in measured.full_by_tokens
        ],
    )
    world, found = World(measured, 0.9, 0.0, overhead=0.001), controller(slow, has_draft=False)
    first = world.decode(found, 100, 2000)
    later = world.decode(found, 400, 2000, seed=1)
    assert first < 0.98 and later > 0.99, (first, later)
    assert found.measured.overhead(1) < 0
