"""Promise: the controller takes what is fastest by what it measured, and never pays for a guess."""

import copy
import itertools
import random
from dataclasses import dataclass

import pytest

from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import Candidate, Choice, Controller, CostModel
from vllm_triforce.controller.acceptance import Rate, expected_accepted
from vllm_triforce.controller.cost_model import Measurements, interpolate
from vllm_triforce.controller.planner import PLAIN, Option, Route, best_gamma, plan

# A 7B-like model: the pass is bound by reading weights and KV, more tokens cost little.
LONG_PAYS = Measurements(
    full_by_rows=[(1, 0.010), (16, 0.0105), (128, 0.014)],
    full_by_tokens=[
        (1, [(16, 0.010), (100_000, 0.040)]),
        (17, [(16, 0.011), (100_000, 0.048)]),
    ],
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


def controller(measured: Measurements, has_draft=True, **keys) -> Controller:
    config = TriForceConfig(**keys).fill(can_adapt=True).resolve(32)
    found = Controller(config, has_draft)
    found.start(CostModel(measured))
    return found


def test_interpolation():
    points = [(1, 10.0), (3, 20.0), (5, 60.0)]
    wanted = {0: 10, 1: 10, 2: 15, 3: 20, 4: 40, 5: 60, 6: 80}
    assert {x: interpolate(points, x) for x in wanted} == wanted
    assert interpolate([(4, 7.0)], 100) == 7


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.95, 1.0])
def test_expected_accepted_is_what_happens(rate):
    draw = random.Random(0)
    for length in (1, 3, 8):
        total = 0
        for _ in range(20_000):
            accepted = 0
            while accepted < length and draw.random() < rate:
                accepted += 1
            total += accepted
        assert expected_accepted(rate, length) == pytest.approx(total / 20_000, abs=0.06)


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


def test_plan_finds_the_best_of_all_combinations():
    """Against trying every combination: tokens per second of the step are the same."""
    draw = random.Random(1)
    for _ in range(300):
        requests = [
            [
                Option(Choice(Route.LEVELS, k), draw.uniform(0, 5), draw.uniform(0.001, 3))
                for k in range(1, draw.randint(1, 4))
            ]
            for _ in range(draw.randint(1, 4))
        ]
        plain = draw.uniform(0.5, 3)

        def speed(chosen, plain=plain, requests=requests):
            taken = [option for option in chosen if option]
            seconds = plain + sum(o.seconds for o in taken)
            return (len(requests) + sum(o.tokens for o in taken)) / seconds

        everything = itertools.product(*([None, *options] for options in requests))
        best = max(map(speed, everything))
        found = [
            next((o for o in options if o.choice is choice), None)
            for options, choice in zip(requests, plan(requests, plain))
        ]
        assert speed(found) == pytest.approx(best)


def test_gamma_rises_with_acceptance_and_falls_with_the_drafts_price():
    model = CostModel(LONG_PAYS)
    gammas = [best_gamma(model, rate, 1, 4)[0] for rate in (0.0, 0.5, 0.9, 0.99)]
    assert gammas == sorted(gammas) and gammas[0] == 0 and gammas[-1] == 4
    model.measured.draft, old = 0.1, model.measured.draft
    assert best_gamma(model, 0.9, 1, 4)[0] == 0
    model.measured.draft = old


def test_one_bad_request_decodes_plainly_the_others_do_not():
    found = controller(LONG_PAYS, has_draft=False)
    good, bad = Candidate("good", 100_000, 16), Candidate("bad", 100_000, 16)
    found.choose([good, bad])
    for _ in range(30):
        found.observe_full_pass("good", 16, 16)
        found.observe_full_pass("bad", 16, 0)
    found._allowance = 0.0
    chosen = found.choose([good, bad])
    assert chosen[0].num_tokens == 16 and chosen[1] is PLAIN


def test_nothing_pays_nothing_is_done():
    """No proposal, no trial, and rest: a batch that cannot win is not even looked at each step."""
    found = controller(NOTHING_PAYS)
    for _ in range(100):
        found.begin_step()
        if not found.is_resting:
            assert found.choose([Candidate("a", 4000, 16)]) == [PLAIN]
            assert found.is_resting


@dataclass
class World:
    """A machine and a text: what really happens when the controller decides."""

    measured: Measurements
    level2: float
    """Level 3's acceptance of a token of level 2."""
    draft: float
    overhead: float = 0.002

    def decode(self, found: Controller, num_tokens: int, context: int, seed=0) -> float:
        """Tokens per second."""
        draw, truth = random.Random(seed), CostModel(self.measured)
        emitted, seconds = 0, 0.0

        def accepted(rate: float, length: int) -> int:
            count = 0
            while count < length and draw.random() < rate:
                count += 1
            return count

        while emitted < num_tokens:
            found.begin_step()
            choice = PLAIN
            if not found.is_resting:
                most = min(16, found.config.num_speculative_tokens)
                choice = found.choose([Candidate("a", context + emitted, most)])[0]
            length = choice.num_tokens
            if choice.route is Route.LEVELS:
                made = 0
                while made < length:
                    route, count = found.level1("a", False, 0, 1, length - made - 1)
                    count = count if route is Route.DRAFT else 0
                    level1 = count * truth.draft(1)
                    level2 = truth.level2(1, count + 1)
                    kept = accepted(self.draft, count)
                    found.observe_round("a", route, 0, count, kept)
                    found.observe_times(1, count, [count], count + 1, True, level1, level2, 0.0)
                    made += kept + 1
                    seconds += level1 + level2
            elif choice.route is Route.DRAFT:
                seconds += length * truth.draft(1)
            step = truth.full_pass([1 + length], [context + emitted]) + self.overhead
            found.measured.observe_step(length, True, [1 + length], [context + emitted], step)
            seconds += step
            rate = self.level2 if choice.route is Route.LEVELS else self.draft * self.level2
            kept = accepted(rate, length)
            if length:
                found.observe_full_pass("a", length, kept)
            emitted += kept + 1
        return emitted / seconds

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


@pytest.mark.parametrize("level2, draft", [(0.8, 0.3), (0.95, 0.5), (0.99, 0.8)])
def test_as_fast_as_the_best_fixed_setting(level2, draft):
    """Against every fixed length and gamma, each with its own run of the same world. The shorter of
    two lengths that gain nearly the same is taken, which costs some of it."""
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


def test_a_text_that_changes_is_noticed():
    """Acceptance that breaks off and comes back: plain decoding between, speculation after."""
    found = controller(LONG_PAYS)
    good, bad = World(LONG_PAYS, 0.98, 0.6), World(LONG_PAYS, 0.0, 0.0)
    assert good.decode(found, 2000, 100_000) > 1.5 * good.plain(2000, 100_000)
    assert bad.decode(found, 4000, 100_000) > 0.97 * bad.plain(4000, 100_000)
    assert good.decode(found, 4000, 100_000) > 1.4 * good.plain(4000, 100_000)


def test_what_was_given_is_not_chosen():
    found = controller(NOTHING_PAYS, num_speculative_tokens=5, gamma=3, min_context=0)
    assert found.choose([Candidate("a", 10, 5)]) == [Choice(Route.LEVELS, 5)]
    assert found.level1("a", False, 4, 1, 4) == (Route.DRAFT, 3)
    by_length = controller(NOTHING_PAYS, num_speculative_tokens=5)
    assert by_length.choose([Candidate("a", 10, 5)]) == [PLAIN]


def test_a_seeded_request_does_not_depend_on_times():
    """The same decisions on a fast and a slow machine, before and after anything was measured."""
    seeded = Candidate("a", 20_000, 16, match_length=5, has_seed=True)
    found = set()
    for measured in (LONG_PAYS, NOTHING_PAYS):
        one = controller(measured)
        for _ in range(3):
            found.add((one.choose([seeded])[0], one.level1("a", True, 5, 1, 15)))
            one.observe_full_pass("a", 6, 0)
            one.measured.observe_step(6, True, [7], [20_000], 1.0)
    assert found == {(Choice(Route.LEVELS, 6), (Route.DRAFT, 2))}
    assert one.choose([Candidate("b", 8000, 16, has_seed=True)]) == [PLAIN]  # below twice 4096
    given = controller(LONG_PAYS, gamma=3)
    assert given.level1("a", True, 5, 1, 15) == (Route.DRAFT, 3)  # a given value is not changed


def test_no_rest_puts_off_a_seeded_request():
    """It begins at its context, whatever a rest of the batch would be."""
    found = controller(NOTHING_PAYS)
    found.begin_step()
    assert found.choose([Candidate("a", 8190, 16, has_seed=True)]) == [PLAIN]
    found.begin_step()
    assert found.is_resting  # one token is still missing
    found.begin_step()
    assert not found.is_resting


def test_ranks_decide_alike_though_their_clocks_differ():
    box = {}

    def adopt(rank, mine):
        if rank == 0:
            box["model"] = copy.deepcopy(mine)  # as a broadcast does
        return box["model"]

    ranks = []
    for rank, measured in enumerate((LONG_PAYS, NOTHING_PAYS)):
        one = Controller(TriForceConfig().fill(can_adapt=True).resolve(32), True)
        one.start(CostModel(measured), adopt=lambda mine, rank=rank: adopt(rank, mine))
        ranks.append(one)
    draw = random.Random(3)
    for step in range(200):
        decided = []
        accepted = draw.randint(0, 16)
        for rank, one in enumerate(ranks):
            one.begin_step()
            choice = one.choose([Candidate("a", 30_000 + step, 16, match_length=step % 3)])
            decided.append((choice, one.level1("a", False, step % 3, 1, 9), one.is_resting))
            one.observe_full_pass("a", 16, accepted)
            one.observe_times(1, 3, [2], 4, True, 0.01 * (rank + 1), 0.02, 0.0)
            slow = 0.05 * (1 + rank * draw.random())
            one.measured.observe_step(16, True, [17], [30_000], slow)
        assert decided[0] == decided[1]


def test_measured_times_replace_the_prediction():
    """A machine that is three times slower at level 2 than at start-up is noticed."""
    model = CostModel(LONG_PAYS)
    before = model.level2(1, 3)
    for _ in range(100):
        model.observe("level 2", model.level2(1, 3), 3 * before)
        model.observe_step(0, True, [1], [16], 0.030)
        model.observe_step(6, True, [7], [16], 0.005)
    assert model.level2(1, 3) == pytest.approx(3 * before, rel=0.05)
    assert model.overhead(1) > 0.015
    for _ in range(100):
        model.observe_proposal(4, shares=0.010, seconds=0.015)
    assert model.stretch(4) == pytest.approx(1.5, rel=0.01) and model.stretch(1) == 1.0
    assert model.full_pass([7], [16]) <= 0.0065  # faster than measured at start-up
