"""Promise: on Model Runner V2 every step says what its requests propose behind it, and nobody is
given placeholders for what will never be proposed."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from tests.unit.worlds import LONG_PAYS
from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller.async_controller import AsyncController, Outcome
from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core.messages import (
    RequestPlan,
    RequestReport,
    StepPlan,
    StepReport,
    attach_plan,
    plan_of,
    report_of,
)
from vllm_triforce.core.messages import attach_report as send
from vllm_triforce.scheduler.v2 import StepPlanMixin

PLACEHOLDERS = [-1] * 6
ALL = RequestPlan(HIERARCHICAL, 6, 3)


def resolved(can_adapt: bool = False, **keys):
    return TriForceConfig(**keys).with_defaults(can_adapt, has_fixed_shapes=True).resolve(16)


class Running:
    """A request of vLLM's scheduler, in the middle of its completion."""

    def __init__(self, name: str, computed: int = 2000, max_tokens: int = 1000, **params) -> None:
        self.request_id = name
        self.num_computed_tokens = computed
        self.num_prompt_tokens = 1900
        self.num_tokens = 1995
        self.max_tokens = max_tokens
        self.is_prefill_chunk = False
        self.sampling_params = SamplingParams(**params)
        self.spec_token_ids = []


class VLLMs:
    """vLLM's scheduler as far as plans need it: placeholders for every request that decodes."""

    def __init__(self, vllm_config, max_num_running_reqs: int) -> None:
        self.vllm_config, self.max_num_running_reqs = vllm_config, max_num_running_reqs
        self.num_spec_tokens, self.max_model_len = 6, 4096
        self.requests, self.running = {}, []

    def _next_needs(self):
        return None

    def _share_tokens(self, wanted, needs):
        return wanted

    def _lend(self, output, wanted, needs):
        return wanted

    def _update_after_schedule(self, output) -> None:
        for request_id in output.num_scheduled_tokens:
            if not self.requests[request_id].is_prefill_chunk:
                self.requests[request_id].spec_token_ids = PLACEHOLDERS


class Ours(StepPlanMixin, VLLMs):
    def step(self, *requests: Running) -> dict:
        """Return the plan of a step of these requests."""
        self.requests = {request.request_id: request for request in requests}
        self.running = list(requests)
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {
            name: 1 + len(request.spec_token_ids) for name, request in self.requests.items()
        }
        output.scheduled_spec_decode_tokens = {
            name: request.spec_token_ids
            for name, request in self.requests.items()
            if request.spec_token_ids
        }
        output.scheduled_cached_reqs.req_ids = list(self.requests)
        output.scheduled_cached_reqs.num_computed_tokens = [2000] * len(requests)
        self._update_after_schedule(output)
        self.last = output
        plan = plan_of(output).proposing
        for request in requests:
            planned = plan[request.request_id].num_tokens if request.request_id in plan else 0
            assert request.spec_token_ids == PLACEHOLDERS[:planned]
        return plan


@pytest.fixture
def scheduler():
    keys = resolved(min_context=1000, max_speculating_seqs=2).to_dict()
    config = SimpleNamespace(additional_config={"triforce": {**keys, "draft_model": None}})
    return Ours(config, 8)


def test_short_contexts_and_prefills_propose_nothing(scheduler):
    reading = Running("reading")
    reading.is_prefill_chunk = True
    assert scheduler.step(Running("short", computed=999), reading, Running("long")) == {"long": ALL}


def test_who_names_tokens_or_asks_for_none_proposes_nothing(scheduler):
    named = Running("named", logprob_token_ids=[1, 2])
    assert scheduler.step(named, Running("usual")) == {"usual": ALL}
    off = Running("off", extra_args={"triforce": False})
    few = Running("few", extra_args={"triforce": {"num_speculative_tokens": 2}})
    assert scheduler.step(off, few) == {"few": replace(ALL, num_tokens=2, num_rounds=1)}
    allowed = Running("allowed", allowed_token_ids=[1, 2])
    assert scheduler.step(allowed) == {"allowed": ALL}, "level 2 knows of them"


@pytest.mark.parametrize(("max_tokens", "expected"), [(95 + 9, 6), (95 + 5, 3), (95 + 3, 1)])
def test_nothing_is_proposed_beyond_the_end(scheduler, max_tokens, expected):
    """95 tokens are known; this step and the next one add one each."""
    (its,) = scheduler.step(Running("one", max_tokens=max_tokens)).values()
    assert its.num_tokens == expected
    assert scheduler.step(Running("one", max_tokens=95 + 2)) == {}
    seeded = scheduler.step(Running("one", max_tokens=max_tokens, seed=3))
    assert seeded == {"one": ALL}, "the device cuts it, by what it knows for certain"
    greedy = Running("one", max_tokens=max_tokens, temperature=0, seed=3)
    (planned,) = scheduler.step(greedy).values()
    assert planned == its, "it draws nothing"


def test_as_many_speculate_as_the_worker_keeps_something_for(scheduler):
    first, second, third = (Running(name) for name in "abc")
    assert set(scheduler.step(first, second, third)) == {"a", "b"}
    assert set(scheduler.step(third, second, first)) == {"a", "b"}, "who has a slot keeps it"
    assert set(scheduler.step(second, third)) == {"b", "c"}, "who has left gives it up"
    assert set(scheduler.step(first, third, second)) == {"b", "c"}


@pytest.mark.parametrize(
    ("levels", "most", "expected"),
    [
        ("1,2,3", 6, RequestPlan(HIERARCHICAL, 6, 3)),
        ("1,2,3", 1, RequestPlan(HIERARCHICAL, 1, 1)),
        ("1,3", 5, RequestPlan("prompt_lookup", 5, 3)),
        ("2,3", 4, RequestPlan(HIERARCHICAL, 4, 4)),
    ],
)
def test_fixed_plans(levels, most, expected):
    config = resolved(levels=levels)
    assert config.gamma == 2
    assert RequestPlan.fixed(config, most) == expected


def test_a_plan_goes_where_its_step_goes():
    """vLLM pickles a step for workers in other processes."""
    output = SchedulerOutput.make_empty()
    assert plan_of(output) is None
    plan = StepPlan(7, {"a": ALL})
    attach_plan(output, plan)
    assert plan_of(pickle.loads(pickle.dumps(output))) == plan


class Outputs:
    """Outputs of a worker, in which the first ``accepted`` drafts of each request are right."""

    def __init__(self, scheduler: Ours) -> None:
        self._scheduler = scheduler
        self._before: StepPlan | None = None

    def of_last_step(self, accepted: int, shorter: int = 0, measured=None) -> SimpleNamespace:
        """
        Args:
            shorter: tokens by which proposals are shorter than was planned.
        """
        step, before = self._scheduler.last, self._before
        self._before = plan_of(step)
        names = list(step.num_scheduled_tokens)
        output = SimpleNamespace(
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[5] * (1 + accepted)] * len(names),
        )
        if before is not None:
            proposed = {
                name: RequestReport(its.num_tokens - shorter, its.num_rounds, 3, 1)
                for name, its in before.proposing.items()
            }
            send(output, lambda: StepReport(before.number, proposed, measured=measured))
        return output


def _disabling(scheduler: Ours, *names: str) -> None:
    """Report these requests as disabled in the last step's output."""
    step = scheduler.last
    output = SimpleNamespace(
        req_id_to_index={name: place for place, name in enumerate(step.num_scheduled_tokens)},
        sampled_token_ids=[[5]] * len(step.num_scheduled_tokens),
    )
    number = plan_of(step).number
    send(output, lambda: StepReport(number - 1, {}, disabled=names))
    scheduler.learn_from_report(step, output)


def test_nothing_is_planned_for_disabled_requests(scheduler):
    first, second, third = (Running(name) for name in "abc")
    assert set(scheduler.step(first, second, third)) == {"a", "b"}
    _disabling(scheduler, "a", "gone")
    assert set(scheduler.step(first, second, third)) == {"b", "c"}, "its slot is another's"
    assert plan_of(scheduler.last).disabled == ("a",), "every rank releases it in this step"
    _disabling(scheduler)
    assert set(scheduler.step(first, second)) == {"b"}, "for good"
    scheduler.step(second)
    assert set(scheduler.step(first)) == {"a"}, "another of its name"


@pytest.fixture
def choosing():
    keys = resolved(True).to_dict()
    config = SimpleNamespace(additional_config={"triforce": {**keys, "draft_model": None}})
    scheduler = Ours(config, 8)
    scheduler.clock = lambda: 0.0
    return scheduler


@pytest.mark.parametrize("accepted", [2, 20], ids=["rejected", "padding too"])
def test_decisions_begin_with_measurements(choosing, monkeypatch, accepted):
    """Padding that the full pass accepts beside a shorter proposal counts for nothing."""
    seen = []
    monkeypatch.setattr(AsyncController, "on_step_end", lambda self, step: seen.append(step))
    request, outputs = Running("one"), Outputs(choosing)
    for measured in (None, None, LONG_PAYS, None, None):
        plan = choosing.step(request)
        choosing.learn_from_report(choosing.last, outputs.of_last_step(accepted, 1, measured))
        assert bool(plan) == (len(seen) > 3), "the first report comes with the second output"
    *_, last = seen
    (outcome,) = last.outcomes.values()
    proposed = last.tokens[0] - 2
    expected = Outcome(proposed, proposed, min(accepted, proposed), outcome.num_rounds, 3, 1)
    assert outcome == expected and last.is_comparable and last.contexts == [2000]


def test_a_report_goes_with_the_output_of_the_step_after():
    from vllm_triforce.runner_v2.reports import Reports

    reports, device = Reports(torch.device("cpu")), torch.device("cpu")
    outcomes = torch.tensor([[6, 3, 4, 1]], dtype=torch.int32, device=device)
    reports.begin_step(7)
    reports.add(["a"], outcomes)
    first = SimpleNamespace(req_ids=["a"])
    assert report_of(reports.attach_to(first)) is None
    outcomes.zero_()  # the buffer is the next proposal's
    reports.begin_step(8)
    later = SimpleNamespace(req_ids=["a"], get_output=lambda: SimpleNamespace())
    made = reports.attach_to(later).get_output()
    assert report_of(made) == StepReport(7, {"a": RequestReport(6, 3, 4, 1)})
    reports.set_measurements(LONG_PAYS)
    reports.begin_step(8)  # one without tokens: it has no output
    reports.begin_step(9)
    assert report_of(reports.attach_to(SimpleNamespace(req_ids=["a"]))).measured is LONG_PAYS
    reports.begin_step(None)
    reports.begin_step(None)
    reports.add_disabled(["a"])
    known = SimpleNamespace(req_ids=["a"])
    assert report_of(reports.attach_to(known)) == StepReport(9, disabled=("a",))
    reports.begin_step(10)
    reports.begin_step(None)
    assert report_of(reports.attach_to(SimpleNamespace(req_ids=["a"]))) == StepReport(10)
    assert report_of(reports.attach_to(SimpleNamespace(req_ids=["a"]))) is None


@pytest.mark.parametrize(("scheduler_cls", "is_chosen"), [(None, True), ("some.Scheduler", False)])
def test_nothing_is_left_open_for_a_scheduler_that_makes_no_plans(
    monkeypatch, scheduler_cls, is_chosen
):
    from vllm_triforce.config import checks
    from vllm_triforce.vllm_patches.engine_args import _split

    monkeypatch.setattr(checks, "has_fixed_shapes", lambda: True)
    keys = {"method": "triforce"}
    asked = SimpleNamespace(speculative_config=keys, scheduler_cls=scheduler_cls, max_num_seqs=None)
    asked.enable_lora = False
    config, _ = _split(asked)
    assert bool(config.adaptive_keys) == is_chosen
    assert (config.resolve(16).min_context == 0) == is_chosen
