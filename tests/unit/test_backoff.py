"""Promise: what speculation is compared with is plain decoding undisturbed, and looking at a batch
that decodes plainly costs no more than its share of the time."""

import itertools

import pytest

from tests.unit.worlds import LONG_PAYS, NOTHING_PAYS, controller, matched
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.exploration import (
    LONGEST_REST,
    SHORTEST_REST,
    TRIAL_SHARE,
    SpeculationBackoff,
)
from vllm_triforce.controller.routes import PLAIN, Candidate


def test_a_rest_begins_and_ends():
    """A rest of six steps from step 1 ends with a decision in step 7."""
    backoff = SpeculationBackoff()
    backoff.begin_step()
    backoff.begin(6)
    seen = []
    for _ in range(7):
        backoff.begin_step()
        seen.append((backoff.step, backoff.is_resting, backoff.is_settled))
    assert seen == [
        (2, True, False),  # the first one after others is slower
        *((step, True, True) for step in (3, 4, 5, 6)),
        (7, False, False),
        (8, False, False),
    ]


def resting(decision_s: float):
    """Return a controller whose decisions delay a step by ``decision_s``, and a plain step."""
    found = controller(NOTHING_PAYS)
    found.clock = itertools.count(0.0, decision_s / 2).__next__
    return found, found.measured.full_pass([1], [4000])


def decisions(found, num_steps: int, joins=lambda step: False) -> list[int]:
    """Return the steps in which the controller decides; each time it stays plain."""
    steps = []
    for step in range(num_steps):
        found.backoff.begin_step()
        if joins(step):
            found.requests_joined()
        if not found.backoff.is_resting:
            assert found.choose([Candidate("a", 4000, 16)]) == [PLAIN]
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    "decision_s, first",
    [
        (1e-6, [0, SHORTEST_REST, 2 * SHORTEST_REST]),
        (0.005, []),
        (10.0, [0, SHORTEST_REST, 3 * SHORTEST_REST, 7 * SHORTEST_REST]),
    ],
)
def test_rests_pay_for_their_decisions(decision_s, first):
    """Nothing pays: rests double until a decision has its share, from 4 to 128 steps."""
    found, plain_s = resting(decision_s)
    num_steps = 10_000
    steps = decisions(found, num_steps)
    assert steps[: len(first)] == first
    share = len(steps) * min(decision_s, plain_s) / (num_steps * plain_s)
    assert share <= 1.1 * TRIAL_SHARE or len(steps) <= num_steps / LONGEST_REST + 6
    assert len(steps) >= num_steps / LONGEST_REST


def test_after_a_proposal_rests_begin_with_a_step():
    """One match that pays among steps without any: the next may be near."""
    steps, _ = with_matches(25, lambda step: step < 9)
    assert steps[-6:] == [(8, False), (9, True), (10, True), (12, True), (16, True), (24, True)]


def test_the_baseline_is_timed_where_every_second_step_has_a_match():
    """Rests of one step have no plain step that is timed, so that probes are due."""
    assert with_matches(1000, lambda step: not step % 2)[1] > 0


def with_matches(num_steps: int, has_match) -> tuple[list[tuple[int, bool]], int]:
    """Return the decisions, True for plain ones, where matches pay; and the settled steps."""
    found = controller(LONG_PAYS, has_draft=False, levels="1,3")
    found.clock = itertools.count(0.0, 0.005).__next__
    steps, num_settled = [], 0
    for step in range(num_steps):
        found.backoff.begin_step()
        num_settled += found.backoff.is_settled
        if not found.backoff.is_resting:
            candidate = Candidate("a", 16_000, 4, matched(8 if has_match(step) else 0))
            steps.append((step, found.choose([candidate]) == [PLAIN]))
    return steps, num_settled


@pytest.mark.parametrize("decision_s, every", [(0.0005, 1), (0.002, 3), (0.005, 10)])
def test_decisions_take_no_more_however_often_requests_join(decision_s, every):
    found, plain_s = resting(decision_s)
    steps = decisions(found, 5000, joins=lambda step: step % every == 0)
    share = len(steps) * decision_s / (5000 * plain_s)
    assert 0.5 * TRIAL_SHARE <= share <= 1.1 * TRIAL_SHARE


@pytest.mark.parametrize("num_before", [0, 20])
def test_one_slow_decision_makes_no_rest_long(num_before):
    """The first one, as long as twenty others, or one in which the engine stood still."""
    model = CostModel(NOTHING_PAYS)
    for seconds in [0.0005] * num_before + [0.01 if num_before == 0 else 1.0] + [0.0005] * 8:
        model.observe_decision(seconds)
    assert model.decision_s == pytest.approx(0.001, rel=0.2)


def test_a_request_that_joins_is_decided_on_as_soon_as_that_is_paid_for():
    """At once where decisions take no time, but not in the step that reads the prompt."""
    found, _ = resting(1e-6)
    steps = decisions(found, 100, joins=lambda step: step == 81)
    assert 80 in steps and 82 in steps and 81 not in steps


@pytest.mark.parametrize("has_seed, keys", [(True, {}), (False, {"min_context": 0})])
def test_seeds_and_a_given_min_context_end_a_rest(has_seed, keys):
    found = controller(NOTHING_PAYS, **keys)
    found.backoff.begin(50)
    found.backoff.begin_step()
    assert found.backoff.is_resting
    found.seeded_request_joined() if has_seed else found.requests_joined()
    assert not found.backoff.is_resting
