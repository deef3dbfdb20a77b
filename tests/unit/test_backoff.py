"""Promise: what speculation is compared with is plain decoding undisturbed, and looking at a batch
that decodes plainly costs no more than its share of the time."""

import random
import statistics
from dataclasses import replace

import pytest

from tests.unit.worlds import NOTHING_PAYS, controller
from vllm_triforce.controller.backoff import (
    LONGEST_PAID_REST,
    SHORTEST_PAID_REST,
    SpeculationBackoff,
)
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.options import Candidate
from vllm_triforce.controller.routes import PLAIN
from vllm_triforce.controller.trials import TRIAL_SHARE


def test_a_rest_begins_and_ends():
    """A rest of six steps from step 1 ends with a re-evaluation in step 7."""
    backoff = SpeculationBackoff()
    backoff.begin_step()
    backoff.begin(6)
    seen = []
    for _ in range(7):
        backoff.begin_step()
        seen.append((backoff.step, backoff.is_resting, backoff.is_settled, backoff.is_reevaluation))
    assert seen == [
        (2, True, False, False),  # the first one after others is slower
        *((step, True, True, False) for step in (3, 4, 5, 6)),
        (7, False, False, True),
        (8, False, False, False),
    ]


def test_few_steps_at_rest_are_timed():
    """Of settled steps one in eight is timed, which takes two begins."""
    backoff = SpeculationBackoff()
    backoff.begin(801)
    timed = 0
    for _ in range(800):
        backoff.begin_step()
        timed += backoff.wants_times
    assert timed == 1 + 200


def test_reevaluations_are_timed_apart():
    model = CostModel(NOTHING_PAYS)
    plain = model.full_pass([1, 1], [50, 60])
    model.observe_step(StepTime(True, [1, 1], [50, 60], plain + 0.004))
    assert model.overhead(2) == pytest.approx(0.004) and not model.reevaluation_seconds(2, True)
    for _ in range(50):
        step = StepTime(True, [1, 1], [50, 60], plain + 0.006, proposal_seconds=0.001)
        model.observe_step(replace(step, is_reevaluation=True))
    assert model.overhead(2) == pytest.approx(0.004)
    assert model.reevaluation_seconds(2, True) == pytest.approx(0.002)


def test_a_noisy_clock_makes_no_rest_long():
    """Steps vary by 10 %, a decision takes a thousandth: it is not taken for a tenth."""
    model, draw, found = CostModel(NOTHING_PAYS), random.Random(0), []
    plain = model.full_pass([1], [50])
    for _ in range(1000):
        for decides in (False, False, True):
            seconds = (plain + decides * plain / 1000) * draw.gauss(1, 0.1)
            step = StepTime(True, [1], [50], seconds, proposal_seconds=decides * plain / 1000)
            model.observe_step(replace(step, is_reevaluation=decides))
        found.append(model.reevaluation_seconds(1, True))
    assert statistics.mean(found) < 0.01 * plain


def test_a_machine_that_slows_down_makes_no_rest_long():
    """A decision that met the slow machine would seem to take a plain step's time."""
    model = CostModel(NOTHING_PAYS)
    plain = model.full_pass([1], [50])
    for slowness in (1, 1, 3, 1, 1):
        step = StepTime(True, [1], [50], slowness * plain, proposal_seconds=slowness * 0.001)
        model.observe_step(replace(step, is_reevaluation=True))
        model.observe_step(StepTime(True, [1], [50], plain))
        assert model.reevaluation_seconds(1, True) <= 3 * 0.003


def resting(reevaluation_s: float):
    """Return a controller that measured what a re-evaluation adds to a step, and a plain step."""
    found = controller(NOTHING_PAYS)
    plain_s = found.measured.full_pass([1], [4000])
    step = StepTime(True, [1], [4000], plain_s + reevaluation_s, proposal_seconds=reevaluation_s)
    found.measured.observe_step(replace(step, is_reevaluation=True))
    found.start(found.measured)
    return found, plain_s


def reevaluations(found, num_steps: int, joins=lambda step: False) -> list[int]:
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
    "reevaluation_s, first",
    [
        (1e-6, [0, SHORTEST_PAID_REST, 2 * SHORTEST_PAID_REST]),
        (0.005, []),
        (10.0, [0, LONGEST_PAID_REST, 2 * LONGEST_PAID_REST]),
    ],
)
def test_rests_pay_for_their_decisions(reevaluation_s, first):
    """Nothing pays: a rest lasts until a decision has its share, 4 to 128 steps."""
    found, plain_s = resting(reevaluation_s)
    num_steps = 10_000
    steps = reevaluations(found, num_steps)
    assert steps[: len(first)] == first
    share = len(steps) * min(reevaluation_s, plain_s) / (num_steps * plain_s)
    assert share <= 1.1 * TRIAL_SHARE or len(steps) <= num_steps / LONGEST_PAID_REST + 1
    assert len(steps) >= num_steps / LONGEST_PAID_REST


def test_rests_double_while_the_time_of_decisions_is_not_known():
    assert reevaluations(controller(NOTHING_PAYS), 100) == [0, 8, 24, 56, 88]


@pytest.mark.parametrize("reevaluation_s, every", [(0.0005, 1), (0.002, 3), (0.005, 10)])
def test_reevaluations_take_no_more_however_often_requests_join(reevaluation_s, every):
    found, plain_s = resting(reevaluation_s)
    steps = reevaluations(found, 5000, joins=lambda step: step % every == 0)
    share = len(steps) * reevaluation_s / (5000 * plain_s)
    assert 0.5 * TRIAL_SHARE <= share <= 1.1 * TRIAL_SHARE


def test_a_request_that_joins_is_reevaluated_as_soon_as_that_is_paid_for():
    """At once after a long rest, but not in the step that reads the prompt."""
    steps = reevaluations(controller(NOTHING_PAYS), 100, joins=lambda step: step == 80)
    assert 81 in steps and 80 not in steps


@pytest.mark.parametrize("has_seed, keys", [(True, {}), (False, {"min_context": 0})])
def test_seeds_and_a_given_min_context_end_a_rest(has_seed, keys):
    found = controller(NOTHING_PAYS, **keys)
    found.backoff.begin(50)
    found.backoff.begin_step()
    assert found.backoff.is_resting
    found.seeded_request_joined() if has_seed else found.requests_joined()
    assert not found.backoff.is_resting
