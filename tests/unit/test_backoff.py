"""Promise: what speculation is compared with is plain decoding undisturbed, and looking at a batch
that decodes plainly costs no more than its share of the time."""

import pytest

from tests.unit.test_controller import NOTHING_PAYS, controller
from vllm_triforce.controller.backoff import (
    FIRST_REST,
    LONGEST_PAID_REST,
    LONGEST_REST,
    PROBE_STEPS,
    SpeculationBackoff,
)
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.options import Candidate
from vllm_triforce.controller.routes import PLAIN
from vllm_triforce.controller.trials import TRIAL_SHARE


def test_a_rest_begins_and_ends():
    """Decided in step 1 for six steps: 2 to 6 are not asked, 7 is, and is a re-evaluation."""
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


def test_a_batch_that_changed_is_no_reevaluation():
    backoff = SpeculationBackoff()
    backoff.begin(3)
    backoff.next_rest(0.0, 0.01)
    backoff.begin_step()
    backoff.reset()
    backoff.begin_step()
    backoff.begin_step()
    assert not backoff.is_resting and not backoff.is_reevaluation
    assert backoff.next_rest(0.0, 0.01) == FIRST_REST


def test_a_short_rest_is_long_enough_to_be_timed():
    backoff, timed = SpeculationBackoff(), []
    backoff.begin(PROBE_STEPS)
    for _ in range(4):
        backoff.begin_step()
        timed.append((backoff.is_settled, backoff.wants_times))
    settled = timed.index((True, True))
    assert timed[settled + 1][1]  # its end is the next one's begin


def test_few_steps_at_rest_are_timed():
    """A re-evaluation's end, and of settled steps one in eight, with its end."""
    backoff = SpeculationBackoff()
    backoff.begin(801)
    timed = 0
    for _ in range(800):
        backoff.begin_step()
        timed += backoff.wants_times
    assert timed == 1 + 200


def test_what_a_reevaluation_takes_is_learnt_apart():
    model = CostModel(NOTHING_PAYS)
    plain = model.full_pass([1, 1], [50, 60])
    model.observe_step(StepTime(True, [1, 1], [50, 60], plain + 0.004))
    assert model.overhead(2) == pytest.approx(0.004) and not model.reevaluation_seconds(2, True)
    for _ in range(50):
        model.observe_step(StepTime(True, [1, 1], [50, 60], plain + 0.006, is_reevaluation=True))
    assert model.overhead(2) == pytest.approx(0.004)
    assert model.reevaluation_seconds(2, True) == pytest.approx(0.002)


@pytest.mark.parametrize("each", [0.0, 1e-6, 0.0005, 0.005, 10.0])
def test_rests_double_and_pay_for_their_decisions(each):
    """Nothing pays: rests of 8, 16 and 32 steps, or as long as a decision has its share."""
    found = controller(NOTHING_PAYS)
    if each:
        plain = found.measured.full_pass([1], [4000])
        found.measured.observe_step(StepTime(True, [1], [4000], plain + each, is_reevaluation=True))
        found.start(found.measured)
    steps, reevaluations = 20_000, []
    for step in range(steps):
        found.backoff.begin_step()
        if not found.backoff.is_resting:
            assert found.choose([Candidate("a", 4000, 16)]) == [PLAIN]
            reevaluations.append(step)
    if each < 0.0005:
        assert reevaluations[:6] == [0, 8, 24, 56, 88, 120]
    if each == 10.0:
        assert reevaluations[:3] == [0, LONGEST_PAID_REST, 2 * LONGEST_PAID_REST]
    share = (
        len(reevaluations)
        * min(each, plain if each else 0)
        / (steps * found.model.full_pass([1], [4000]))
    )
    assert share <= 1.1 * TRIAL_SHARE or len(reevaluations) <= steps / LONGEST_PAID_REST + 1
    assert len(reevaluations) >= steps / max(LONGEST_REST, LONGEST_PAID_REST)


@pytest.mark.parametrize("each", [0.0005, 0.002, 0.005])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_reevaluations_take_no_more_however_often_requests_join(each, every):
    """A server's batch changes all the time: the share of re-evaluations does not."""
    found = controller(NOTHING_PAYS)
    plain = found.measured.full_pass([1], [4000])
    found.measured.observe_step(StepTime(True, [1], [4000], plain + each, is_reevaluation=True))
    found.start(found.measured)
    num_steps, num_reevaluations = 5000, 0
    for step in range(num_steps):
        found.backoff.begin_step()
        if step % every == 0:
            found.requests_joined()
        if not found.backoff.is_resting:
            assert found.choose([Candidate("a", 4000, 16)]) == [PLAIN]
            num_reevaluations += 1
    share = num_reevaluations * each / (num_steps * plain)
    assert 0.5 * TRIAL_SHARE <= share <= 1.1 * TRIAL_SHARE


def test_a_request_that_joins_is_reevaluated_as_soon_as_that_is_paid_for():
    """Not in the step that reads it, and at once after a long rest."""
    found = controller(NOTHING_PAYS)
    plain = found.measured.full_pass([1], [4000])
    found.measured.observe_step(
        StepTime(True, [1], [4000], plain + plain / 20, is_reevaluation=True)
    )
    found.start(found.measured)
    seen = []
    for step in range(100):
        found.backoff.begin_step()
        if step == 80:
            found.requests_joined()
        if not found.backoff.is_resting:
            found.choose([Candidate("a", 4000, 16)])
            seen.append(step)
    assert 81 in seen and 80 not in seen


@pytest.mark.parametrize("has_seed, keys", [(True, {}), (False, {"min_context": 0})])
def test_who_must_not_wait_does_not(has_seed, keys):
    """A seeded request's lengths depend on no time; and a given least context is held to."""
    found = controller(NOTHING_PAYS, **keys)
    found.backoff.begin(50)
    found.backoff.begin_step()
    assert found.backoff.is_resting
    found.seeded_request_joined() if has_seed else found.requests_joined()
    assert not found.backoff.is_resting


@pytest.mark.parametrize("has_seed", [False, True])
def test_a_seeded_request_begins_where_it_would_alone(has_seed):
    """However long the rest of others would last."""
    found = controller(NOTHING_PAYS)
    begin = found._fixed.tokens_until(Candidate("a", 0, 16))
    assert found.choose([Candidate("a", begin - 5, 16, has_seed=has_seed)]) == [PLAIN]
    for _ in range(5):
        found.backoff.begin_step()
    assert found.backoff.is_resting is not has_seed
