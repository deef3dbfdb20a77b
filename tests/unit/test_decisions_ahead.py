"""Promise: decided steps ahead of what is known, speculation is still never slower than decoding
plainly, and as fast as the best fixed choice where it pays."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from tests.unit.worlds import DRAFT, LONG_PAYS, NOTHING_PAYS, SOURCES, accepted
from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import PLAIN, Candidate, Choice, Controller, CostModel
from vllm_triforce.controller.async_controller import AsyncController, Outcome, StepSeen
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL

GAMMA = 2
# An 8B model with grouped heads on an H200, by arithmetic: its weights are most of what is read, up
# to long contexts and large batches.
GQA_ON_GPU = Measurements(
    full_by_rows=[(1, 0.0040), (16, 0.0041), (64, 0.0045), (256, 0.0065)],
    full_by_tokens=[
        (1, [(16, 0.0040), (8000, 0.0043), (128_000, 0.0080)]),
        (13, [(16, 0.0041), (8000, 0.0046), (128_000, 0.0100)]),
    ],
    level2_by_tokens=[(1, 0.0041), (13, 0.0043)],
    level2_by_batch=[(1, [(0, 0.0041)]), (2, [(0, 0.00415)])],
    draft=0.0005,
    draft_per_row=0.00001,
)
# A 7B model whose heads all have keys of their own.
MHA_ON_GPU = Measurements(
    full_by_rows=[(1, 0.0036), (16, 0.0037), (64, 0.0041), (256, 0.0060)],
    full_by_tokens=[
        (1, [(16, 0.0036), (8000, 0.0050), (128_000, 0.0200)]),
        (13, [(16, 0.0037), (8000, 0.0054), (128_000, 0.0230)]),
    ],
    level2_by_tokens=[(1, 0.0039), (13, 0.0041)],
    level2_by_batch=[(1, [(0, 0.0039)]), (2, [(0, 0.0042)])],
    draft=0.0004,
    draft_per_row=0.00001,
)


class Clock:
    """A clock that goes on by ``deciding`` seconds whenever it is read, twice in a decision."""

    def __init__(self, deciding: float = 0.0) -> None:
        self.now, self._deciding = 0.0, deciding

    def __call__(self) -> float:
        self.now += self._deciding
        return self.now


def decisions(measured: Measurements | None, clock: Clock | None = None) -> AsyncController:
    """Return decisions that have begun, unless nothing is measured."""
    config = TriForceConfig().with_defaults(can_adapt=True, model=DRAFT, has_fixed_shapes=True)
    controller = Controller(config.resolve(32), SOURCES[:1], whole_rounds=True)
    assert controller.config.gamma == GAMMA
    if measured is not None:
        controller.start(CostModel(measured))
    return AsyncController(controller, DRAFT, clock or Clock())


class FixedDecisions:
    """One choice for every request and step, as a user could set it."""

    def __init__(self, choice: Choice, num_rounds: int) -> None:
        self._its, self._num_steps = (choice, num_rounds), 0

    def decide(self, names, candidate, num_plain=0):
        self._num_steps += 1
        plan = {} if self._its[0] is PLAIN else dict.fromkeys(names, self._its)
        return self._num_steps - 1, plan

    def on_step_end(self, step) -> None:
        """It learns nothing."""

    def release(self, request_id) -> None:
        """It knows nobody."""


class Device:
    """A machine and a text, whose outcomes are seen ``delay`` steps late.

    Args:
        level2, draft: acceptance of a token by the level above.
        length: tokens of each request; another comes for one that leaves.
    """

    def __init__(
        self, measured, level2, draft, delay=2, overhead=0.0003, length=400, clock=None
    ) -> None:
        self.truth, self.clock = CostModel(measured), clock or Clock()
        self.level2, self.draft = level2, draft
        self.delay, self.overhead, self.length = delay, overhead, length

    def decode(self, made, size: int, num_steps: int, context: int, seed=0, skip=0) -> float:
        """Return the tokens per second over plain decoding's, after the first ``skip`` steps."""
        draw, truth = random.Random(seed), self.truth
        running: dict[str, int] = {}
        waiting: dict = {}  # request -> (choice, proposed, rounds, accepted, rejected)
        unseen: list[StepSeen] = []
        num_begun = num_tokens = 0
        seconds = plain_seconds = behind = 0.0
        for step in range(num_steps):
            while len(unseen) > self.delay - 1:
                made.on_step_end(unseen.pop(0))
            has_joined = len(running) < size
            while len(running) < size:
                running[str(num_begun)], num_begun = 0, num_begun + 1
            names = list(running)
            contexts = [context + running[name] for name in names]
            candidates = {
                n: Candidate(n, at, 12, is_greedy=False, num_left=self.length - running[n])
                for n, at in zip(names, contexts)
            }
            number, plan = made.decide(names, candidates.__getitem__)
            # The full pass verifies what was planned, proposed or not.
            planned = [waiting[n][0].num_tokens if n in waiting else 0 for n in names]
            full = truth.full_pass([1 + n for n in planned], contexts) + self.overhead
            outcomes, emitted = {}, 0
            for name in names:
                gained = 1
                if name in waiting:
                    choice, proposed, *rounds = waiting[name]
                    rate = self.level2 if choice.route == HIERARCHICAL else self.draft * self.level2
                    kept = accepted(draw, rate, proposed)
                    outcomes[name] = Outcome(proposed, proposed, kept, *rounds)
                    gained += kept
                running[name] += gained
                emitted += gained
            took = behind + full
            self.clock.now += took
            waiting, behind = self._propose(draw, plan)
            unseen.append(
                StepSeen(
                    number,
                    [1 + n for n in planned],
                    contexts,
                    False,
                    took,
                    outcomes,
                    is_comparable=not has_joined,
                )
            )
            if step >= skip:
                seconds += took
                num_tokens += emitted
                plain_seconds += truth.full_pass([1] * size, contexts) + self.overhead
            for name in [n for n in names if running[n] >= self.length]:
                del running[name]
                waiting.pop(name, None)
                made.release(name)
        return num_tokens / seconds / ((num_steps - skip) * size / plain_seconds)

    def _propose(self, draw, plan) -> tuple[dict, float]:
        """Return the proposal of each planned request, and the seconds of all."""
        truth, seconds, made = self.truth, 0.0, {}
        by_levels = {n: its for n, its in plan.items() if its[0].route == HIERARCHICAL}
        count = len(by_levels)
        if by_levels:
            rounds = max(its[1] for its in by_levels.values())
            each = GAMMA * truth.draft(count) + truth.level2(count, GAMMA + 1)
            seconds += rounds * each
        for name, (choice, rounds) in by_levels.items():
            proposed = taken = right = wrong = 0
            while proposed < choice.num_tokens and taken < rounds:
                kept = accepted(draw, self.draft, GAMMA)
                right, wrong, taken = right + kept, wrong + (kept < GAMMA), taken + 1
                proposed = min(choice.num_tokens, proposed + kept + 1)
            made[name] = choice, proposed, taken, right, wrong
        direct = {n: its[0] for n, its in plan.items() if its[0].route == DRAFT}
        if direct:
            seconds += max(c.num_tokens for c in direct.values()) * truth.draft(len(direct))
        made |= {name: (choice, choice.num_tokens, 0, 0, 0) for name, choice in direct.items()}
        return made, seconds


WORLDS = {
    "gqa": GQA_ON_GPU,
    "mha": MHA_ON_GPU,
    "long pays": LONG_PAYS,
    "nothing pays": NOTHING_PAYS,
}


# World, acceptance of level 2 and of the draft, context, requests, delay.
SOME = [
    ("gqa", 0.0, 0.0, 500, 8, 2),
    ("gqa", 0.4, 0.3, 8000, 1, 1),
    ("mha", 0.0, 0.0, 100_000, 1, 2),
    ("mha", 0.7, 0.5, 8000, 8, 1),
    ("long pays", 0.4, 0.3, 100_000, 8, 2),
    ("nothing pays", 0.95, 0.7, 8000, 1, 2),
]
RATES = [(0.0, 0.0), (0.4, 0.3), (0.7, 0.5), (0.95, 0.7)]
GRID = [
    (world, *rates, context, size, delay)
    for world, rates, context, size, delay in itertools.product(
        WORLDS, RATES, (500, 8000, 100_000), (1, 8), (1, 2)
    )
]


def some_and_thorough(some: list[tuple], every: list[tuple]) -> list:
    """Mark the cases of ``every`` that are not in ``some`` as thorough."""
    rest = [pytest.param(*case, marks=pytest.mark.thorough) for case in every if case not in some]
    return [*some, *rest]


@pytest.mark.parametrize(
    "world, level2, draft, context, size, delay", some_and_thorough(SOME, GRID)
)
def test_never_slower(world, level2, draft, context, size, delay):
    """Requests of 400 tokens come and go."""
    device = Device(WORLDS[world], level2, draft, delay)
    found = device.decode(decisions(WORLDS[world]), size, 1200, context, skip=200)
    assert found >= 0.99


FIXED = [
    (PLAIN, 0),
    *((Choice(HIERARCHICAL, n), r) for n, r in ((3, 2), (6, 3), (6, 2), (9, 4), (12, 5), (12, 4))),
    *((Choice(DRAFT, n), 0) for n in (1, 2, 3, 4, 6)),
]


def best_fixed(device: Device, size: int, context: int, fixed=FIXED, num_steps: int = 200) -> float:
    """Return the speed of the best fixed choice, which learns nothing and so needs no warm-up."""
    return max(device.decode(FixedDecisions(*its), size, num_steps, context) for its in fixed)


@pytest.mark.parametrize(
    "world, level2, draft, size",
    some_and_thorough(
        [("mha", 0.95, 0.7, 1), ("gqa", 0.8, 0.5, 8)],
        [
            (world, *rates, size)
            for world, rates, size in itertools.product(
                ("mha", "gqa"), [(0.8, 0.5), (0.95, 0.7), (0.99, 0.8)], (1, 8)
            )
        ],
    ),
)
def test_as_fast_as_the_best_fixed_choice(world, level2, draft, size):
    device = Device(WORLDS[world], level2, draft)
    best = best_fixed(device, size, 100_000)
    found = device.decode(decisions(WORLDS[world]), size, 1000, 100_000, skip=200)
    assert found >= 0.91 * best, (found, best)


@pytest.mark.parametrize("world, level2, draft", [("mha", 0.0, 0.0), ("gqa", 0.95, 0.7)])
def test_decisions_that_take_long_hold_for_several_steps(world, level2, draft):
    """Decisions of 12 ms, hidden behind the device, are fewer and as good."""
    clock, decided = Clock(0.012), []
    made = decisions(WORLDS[world], clock)
    choose = made.controller.choose
    made.controller.choose = lambda *a: decided.append(clock.now) or choose(*a)
    device = Device(WORLDS[world], level2, draft, clock=clock)
    found = device.decode(made, 8, 1000, 100_000, skip=200)
    best = best_fixed(device, 8, 100_000, FIXED[4:7])
    assert found >= max(0.99, 0.92 * best), (found, best)
    assert len(decided) < 670


def test_a_decision_that_holds_is_for_those_that_are_still_there():
    made = decisions(MHA_ON_GPU, clock := Clock(0.0005))
    names, most = ["a", "b", "c"], dict.fromkeys("abcd", 12)

    def candidate(name: str) -> Candidate:
        return Candidate(name, 100_000, most[name], num_left=10_000)

    def ended(number: int, before: dict) -> None:
        plan = {n: choice.num_tokens for n, (choice, _) in before.items()}
        outcomes = {
            n: Outcome(k, k, k, its[1], 2, 0) for (n, k), its in zip(plan.items(), before.values())
        }
        seen = StepSeen(number, [1], [100_000], True, 0.02, outcomes, is_comparable=False)
        made.on_step_end(seen)

    for _ in range(50):
        clock.now += 1.0
        number, first = made.decide(names, candidate)
        if made.controller.is_steady and len(first) == 3:
            break
        ended(number + 1, first)
    assert len(first) == 3
    # One has left, one has come, one is near its end.
    most["c"] = 2
    _, then = made.decide(["a", "c", "d"], candidate)
    assert then.keys() == {"a", "c"} and then["a"] == first["a"]
    assert then["c"] == (dataclasses.replace(first["c"][0], num_tokens=2), first["c"][1])
    # Who has a seed waits for nothing.
    seeded = Candidate("s", 100_000, 12, has_seed=True)
    _, then = made.decide(["a", "s"], lambda name: seeded if name == "s" else candidate(name))
    assert then["s"] == (Choice(HIERARCHICAL, 6), 3)
    clock.now += 1.0
    assert made.decide(["d"], candidate)[1].keys() == {"d"}


def test_a_text_that_changes_is_noticed():
    """Good text becomes hopeless, and good again."""
    made = decisions(MHA_ON_GPU)
    device = Device(MHA_ON_GPU, 0.95, 0.7, length=10**6)
    assert device.decode(made, 4, 400, 100_000, skip=200) > 4
    device.level2 = device.draft = 0.0
    speeds = [device.decode(made, 4, 50, 100_000) for _ in range(4)]
    assert speeds[1] > 0.93 and min(speeds[2:]) >= 0.98, speeds
    device.level2, device.draft = 0.95, 0.7
    assert device.decode(made, 4, 300, 100_000, skip=250) > 4


@pytest.mark.parametrize("most", [12, 5])
def test_proposals_are_longer_than_their_rounds_on_average(most):
    made = decisions(MHA_ON_GPU)
    candidate = Candidate("a", 100_000, most)
    choice, rounds = made.decide(["a"], lambda name: candidate)[1]["a"]
    mean = made.controller.acceptance.of("a").round_tokens * rounds
    assert choice.route == HIERARCHICAL and min(most, mean) <= choice.num_tokens <= most
    assert choice.num_tokens > mean or choice.num_tokens == most


def test_nothing_is_proposed_before_passes_are_measured():
    made = decisions(None)
    only = Candidate("a", 100_000, 12)
    assert made.decide(["a"], lambda name: only) == (0, {})
    seeded = Candidate("a", 100_000, 12, has_seed=True)
    assert made.decide(["a"], lambda name: seeded)[1] == {"a": (Choice(HIERARCHICAL, 6), 3)}
    made.controller.start(CostModel(MHA_ON_GPU))
    assert set(made.decide(["a"], lambda name: only)[1]) == {"a"}


def test_nothing_is_kept_of_finished_requests():
    made = decisions(MHA_ON_GPU)
    Device(MHA_ON_GPU, 0.9, 0.6, length=50).decode(made, 4, 300, 100_000)
    assert made.controller.num_requests <= 4


@pytest.mark.parametrize("level2", [0.1, 0.99])
def test_seeded_proposals_depend_on_nothing_learned(level2):
    made = decisions(MHA_ON_GPU)
    Device(MHA_ON_GPU, level2, 0.5).decode(made, 2, 200, 100_000)
    seeded = Candidate("seeded", 100_000, 12, has_seed=True, is_greedy=False)
    choice, rounds = made.decide(["seeded"], lambda name: seeded)[1]["seeded"]
    assert choice == Choice(HIERARCHICAL, 6) and rounds == 3


def test_rates_are_those_of_the_text():
    """Outcomes come late."""
    made = decisions(MHA_ON_GPU)
    Device(MHA_ON_GPU, 0.9, 0.6, length=10**6).decode(made, 8, 400, 100_000)
    rates = made.controller.acceptance.sampled
    assert rates.level2.value == pytest.approx(0.9, abs=0.06)
    assert rates.of(DRAFT, True, 0).value == pytest.approx(0.6, abs=0.06)
    assert np.mean([r.round_tokens for r, _ in made.controller.acceptance.requests.values()]) == (
        pytest.approx(1 + 0.6 + 0.36, abs=0.2)
    )
