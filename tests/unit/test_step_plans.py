"""Promise: on Model Runner V2 every step says what its requests propose behind it. That nobody is
given placeholders for what will never be proposed is checked in ``tests/simulation``."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.unit.stepping import add, scheduler, step
from tests.unit.test_level2_model import model_config
from tests.unit.worlds import LONG_PAYS
from vllm_triforce.config import checks
from vllm_triforce.controller.async_controller import Outcome
from vllm_triforce.controller.routes import HIERARCHICAL, Choice
from vllm_triforce.core.messages import PLAN, REPORT, RequestReport, StepPlan, StepReport
from vllm_triforce.runner_v2.reports import Reports
from vllm_triforce.scheduler.v2 import _outcomes
from vllm_triforce.vllm_patches.engine_args import _read_keys

ALL = Choice(HIERARCHICAL, 6, 3)


def plans(its, num_steps: int = 1, **how) -> list[dict[str, Choice]]:
    """Return what the next steps plan."""
    return [dict(PLAN.of(step(its, **how)).proposing) for _ in range(num_steps)]


def test_who_names_tokens_or_asks_for_none_proposes_nothing():
    its = scheduler(60, 6)
    asked = {
        "named": dict(logprob_token_ids=[1, 2]),
        "off": dict(extra_args={"triforce": False}),
        "few": dict(extra_args={"triforce": {"num_speculative_tokens": 2}}),
        "allowed": dict(allowed_token_ids=[1, 2]),  # level 2 knows of them
    }
    for name, params in asked.items():
        add(its, name, [5] * 20, **params)
    (found,) = plans(its)
    assert found == {"few": replace(ALL, num_tokens=2, num_rounds=1), "allowed": ALL}


@pytest.mark.parametrize("levels, proposes", [("1,3", False), ("1,2,3", True)])
def test_a_draft_model_drafts_for_no_image(levels, proposes):
    """Without level 2 nothing is planned for its request, which takes no slot of others."""
    its = scheduler(60, 6, levels=levels, draft_sources="draft_model", max_speculating_seqs=1)
    add(its, "image", [5] * 20)
    its.max_num_encoder_input_tokens = 8
    its.encoder_cache_manager = EncoderCacheManager(8)
    image = MultiModalFeatureSpec(None, "image", "image", PlaceholderRange(0, 2))
    its.requests["image"].mm_features = [image]
    add(its, "text", [5] * 20)
    assert [*plans(its, 2)[1]] == (["image"] if proposes else ["text"])


def test_nothing_is_proposed_beyond_the_end():
    """This step and the next one add a token each. The device cuts what a seeded request proposes,
    by what it knows for certain; a greedy one draws nothing that a seed could keep."""
    its = scheduler(60, 6)
    add(its, "one", [5] * 20, max_tokens=12)
    add(its, "seeded", [5] * 20, max_tokens=12, seed=3, temperature=1.0)
    add(its, "greedy", [5] * 20, max_tokens=12, seed=3, temperature=0)
    for num_known in range(10):
        (found,) = plans(its)
        length = min(6, 12 - num_known - 2)
        assert found["one"] == found["greedy"] == Choice(HIERARCHICAL, length, -(-length // 2))
        assert found["seeded"] == ALL
    assert plans(its)[0].keys() == {"seeded"}


def test_a_plan_goes_where_its_step_goes():
    """vLLM pickles a step for workers in other processes."""
    output = SchedulerOutput.make_empty()
    assert PLAN.of(output) is None
    plan = StepPlan(7, {"a": ALL})
    PLAN.attach(output, plan)
    assert PLAN.of(pickle.loads(pickle.dumps(output))) == plan


def test_nothing_is_planned_for_disabled_requests():
    its = scheduler(60, 6, max_speculating_seqs=2)
    for name in "abc":
        add(its, name, [5] * 20)

    def disabling(number: int) -> StepReport:
        return StepReport(number - 1, disabled=("a", "gone"))

    assert plans(its, make_report=disabling)[0].keys() == {"a", "b"}
    for _ in range(2):
        plan = PLAN.of(step(its))
        assert plan.proposing.keys() == {"b", "c"}, "its slot is another's, for good"
        assert plan.disabled == ("a",), "every rank releases it"
    its.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    step(its)
    add(its, "a", [5] * 20)
    assert plans(its)[0].keys() == {"a", "c"}, "another of its name"


@pytest.mark.parametrize("accepted", [2, 5], ids=["rejected", "padding too"])
def test_padding_is_neither_verified_nor_accepted(accepted):
    """An asynchronous scheduler has six tokens verified of a proposal of three."""
    report = StepReport(1, {"a": RequestReport(3, 2, 2, 1)})
    output = ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[7] * (1 + accepted)])
    found = _outcomes(report, {"a": [-1] * 6}, output)
    assert found == {"a": Outcome(3, min(accepted, 3), RequestReport(3, 2, 2, 1))}


def test_a_report_goes_with_the_output_of_the_step_after():
    reports, device = Reports(torch.device("cpu")), torch.device("cpu")
    outcomes = torch.tensor([[6, 3, 4, 1]], dtype=torch.int32, device=device)
    reports.begin_step(7)
    reports.add(["a"], outcomes)
    first = SimpleNamespace(req_ids=["a"])
    assert REPORT.of(reports.attach_to(first)) is None
    outcomes.zero_()  # the buffer is the next proposal's
    reports.begin_step(8)
    later = SimpleNamespace(req_ids=["a"], get_output=lambda: SimpleNamespace())
    made = reports.attach_to(later).get_output()
    assert REPORT.of(made) == StepReport(7, {"a": RequestReport(6, 3, 4, 1)})
    reports.set_measurements(LONG_PAYS)
    reports.begin_step(8)  # one without tokens: it has no output
    reports.begin_step(9)
    assert REPORT.of(reports.attach_to(SimpleNamespace(req_ids=["a"]))).measured is LONG_PAYS
    reports.begin_step(None)
    reports.begin_step(None)
    reports.add_disabled(["a"])
    known = SimpleNamespace(req_ids=["a"])
    assert REPORT.of(reports.attach_to(known)) == StepReport(9, disabled=("a",))
    reports.begin_step(10)
    reports.begin_step(None)
    assert REPORT.of(reports.attach_to(SimpleNamespace(req_ids=["a"]))) == StepReport(10)
    assert REPORT.of(reports.attach_to(SimpleNamespace(req_ids=["a"]))) is None


@pytest.mark.parametrize(("scheduler_cls", "is_chosen"), [(None, True), ("some.Scheduler", False)])
def test_nothing_is_left_open_for_a_scheduler_that_makes_no_plans(
    monkeypatch, scheduler_cls, is_chosen
):
    monkeypatch.setattr(checks, "has_fixed_shapes", lambda: True)
    keys = {"method": "triforce"}
    asked = SimpleNamespace(speculative_config=keys, scheduler_cls=scheduler_cls, max_num_seqs=None)
    asked.enable_lora = False
    config, _, _ = _read_keys(asked, model_config())
    assert bool(config.adaptive_keys) == is_chosen
    assert (config.resolve(16).min_context == 0) == is_chosen
