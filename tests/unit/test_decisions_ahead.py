"""Promise: a decision made steps ahead of what is known holds for who is still there, and waits for
measurements. How fast such decisions are is said in ``tests/simulation``."""

import dataclasses

import pytest

from tests.unit.worlds import DRAFT, SOURCES
from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller import Candidate, Choice, Controller, CostModel
from vllm_triforce.controller.acceptance import Rate
from vllm_triforce.controller.async_controller import AsyncController, Outcome, RequestReport
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL

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
    controller = Controller(config.resolve(32), SOURCES[:1], True, clock or Clock())
    if measured is not None:
        controller.start(CostModel(measured))
    return AsyncController(controller, DRAFT)


def steady(made: AsyncController, clock: Clock, names: list[str], candidate) -> dict:
    """Return the first decision for all of ``names`` that holds for further steps."""
    for _ in range(50):
        clock.now += 1.0
        number, plan = made.decide(names, candidate)
        if made.controller.is_steady and len(plan) == len(names):
            return plan
        end_step(made, number + 1, plan)
    raise AssertionError("no decision holds")


def end_step(made: AsyncController, number: int, plan: dict) -> None:
    """Report that everything proposed by ``plan`` was accepted."""
    outcomes = {}
    for name, choice in plan.items():
        num_tokens, num_rounds = choice.num_tokens, choice.num_rounds
        report = RequestReport(num_tokens, num_rounds, 2, 0)
        outcomes[name] = Outcome(num_tokens, num_tokens, report)
    made.on_step_end(number, outcomes, {}, None)


def test_a_decision_that_holds_is_for_those_that_are_still_there():
    made = decisions(MHA_ON_GPU, clock := Clock(0.0005))
    most = dict.fromkeys("abcd", 12)

    def candidate(name: str) -> Candidate:
        return Candidate(name, 100_000, most[name])

    first = steady(made, clock, ["a", "b", "c"], candidate)
    # One has left, one has come, one is near its end.
    most["c"] = 2
    _, then = made.decide(["a", "c", "d"], candidate)
    assert then.keys() == {"a", "c"} and then["a"] == first["a"]
    assert then["c"] == dataclasses.replace(first["c"], num_tokens=2)
    # Who has a seed waits for nothing.
    seeded = Candidate("s", 100_000, 12, has_seed=True)
    _, then = made.decide(["a", "s"], lambda name: seeded if name == "s" else candidate(name))
    assert then["s"] == Choice(HIERARCHICAL, 6, 3)
    clock.now += 1.0
    assert made.decide(["d"], candidate)[1].keys() == {"d"}


def test_decisions_that_take_long_hold_for_several_steps(monkeypatch):
    """Decisions of 12 ms take a twentieth of the time, in steps of 20 ms."""
    made, decided = decisions(MHA_ON_GPU, clock := Clock(0.012)), []
    candidate = Candidate("a", 100_000, 12)
    steady(made, clock, ["a"], lambda name: candidate)
    choose = made.controller.choose
    monkeypatch.setattr(made.controller, "choose", lambda *a: decided.append(1) or choose(*a))
    for _ in range(200):
        clock.now += 0.02
        number, plan = made.decide(["a"], lambda name: candidate)
        assert plan.keys() == {"a"}
        end_step(made, number + 1, plan)
    assert 200 * 0.02 / 0.25 / 2 < len(decided) < 40


@pytest.mark.parametrize("has_seed", [False, True])
def test_who_joins_does_not_end_a_wait_after_losses(has_seed):
    """Twenty steps earn a plain step; others come in each of them, seeded or not."""
    made = decisions(MHA_ON_GPU, clock := Clock(0.0005))

    def candidate(name: str) -> Candidate:
        is_seeded = has_seed and name != "a"
        return Candidate(name, 100_000, 12, has_seed=is_seeded)

    steady(made, clock, ["a"], candidate)
    made.controller.measured.balance_s = -1e-9
    clock.now += 1.0
    waited = []
    for step in range(24):
        number, plan = made.decide(["a", f"b{step}"], candidate)
        waited.append("a" not in plan)
        end_step(made, number + 1, plan)
    assert waited[:20] == [True] * 20 and not all(waited)


@pytest.mark.parametrize("num_lost, num_steps", [(2, 32), (100, 32), (0, 20)])
def test_what_was_lost_under_way_begins_no_second_wait(num_lost, num_steps):
    """The step that was under way ends in the wait, and loses some plain steps more."""
    made = decisions(MHA_ON_GPU, clock := Clock(0.0005))
    candidate = Candidate("a", 100_000, 12)
    steady(made, clock, ["a"], lambda name: candidate)
    costs = made.controller.measured
    costs.balance_s = -1e-9
    clock.now += 1.0
    waited = []
    for step in range(40):
        number, plan = made.decide(["a"], lambda name: candidate)
        waited.append(not plan)
        end_step(made, number + 1, plan)
        if step == 0:
            costs.balance_s -= num_lost * costs.plain_step([100_000], 1, True)
    assert waited.index(False) == num_steps


@pytest.mark.parametrize("draft_s", [0.0001, 0.006])
def test_rounds_are_learned_whatever_start_up_said_of_the_draft(draft_s):
    """Nothing but rounds, two a step, of 6 ms each."""
    made = decisions(dataclasses.replace(MHA_ON_GPU, draft=draft_s))
    plan = {"a": Choice(HIERARCHICAL, 6, 2)}
    outcomes = {"a": Outcome(6, 6, RequestReport(6, 2, 2, 0))}
    for number in range(100):
        made._add_pending(number, plan, None, {"a": 100_000})
        made.on_step_end(number, outcomes, {HIERARCHICAL: 0.012}, None)
    costs = made.controller.measured
    assert costs.round_seconds(1, 100_000) == pytest.approx(0.006, rel=0.05)


@pytest.mark.parametrize("most", [12, 5])
def test_proposals_are_longer_than_their_rounds_on_average(most):
    made = decisions(MHA_ON_GPU)
    candidate = Candidate("a", 100_000, most)
    choice = made.decide(["a"], lambda name: candidate)[1]["a"]
    mean = made.controller.acceptance.of("a").round_tokens * choice.num_rounds
    assert choice.route == HIERARCHICAL and min(most, mean) <= choice.num_tokens <= most
    assert choice.num_tokens > mean or choice.num_tokens == most


def test_nothing_is_proposed_before_passes_are_measured():
    made = decisions(None)
    only = Candidate("a", 100_000, 12)
    assert made.decide(["a"], lambda name: only) == (0, {})
    seeded = Candidate("a", 100_000, 12, has_seed=True)
    assert made.decide(["a"], lambda name: seeded)[1] == {"a": Choice(HIERARCHICAL, 6, 3)}
    made.controller.start(CostModel(MHA_ON_GPU))
    assert set(made.decide(["a"], lambda name: only)[1]) == {"a"}


@pytest.mark.parametrize("level2", [0.1, 0.99])
def test_seeded_proposals_depend_on_nothing_learned(level2):
    made = decisions(MHA_ON_GPU)
    made.controller.acceptance.sampled.level2 = Rate(level2, weight=500, memory=1000)
    seeded = Candidate("seeded", 100_000, 12, has_seed=True, is_greedy=False)
    choice = made.decide(["seeded"], lambda name: seeded)[1]["seeded"]
    assert choice == Choice(HIERARCHICAL, 6, 3)
