"""Promise: vLLM's own figures count what was proposed, though an asynchronous scheduler has padding
verified beside it."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats

from vllm_triforce.core.messages import PLAN, REPORT, RequestReport, StepPlan, StepReport
from vllm_triforce.scheduler.stats import StatsMixin, send_request_metrics

NUM_PLANNED = 6


class VLLMs:
    """vLLM's scheduler as far as it counts (``Scheduler.update_from_output``)."""

    num_spec_tokens, log_stats, spec_decode_metrics_level = NUM_PLANNED, True, "detailed"
    make_spec_decoding_stats = AsyncScheduler.make_spec_decoding_stats

    def __init__(self) -> None:
        self.requests = {}

    def update_from_output(self, scheduler_output, model_runner_output):
        stats = None
        invalid = scheduler_output.num_invalid_spec_tokens
        for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            place = model_runner_output.req_id_to_index[name]
            accepted = len(model_runner_output.sampled_token_ids[place]) - 1
            stats = self.make_spec_decoding_stats(
                stats,
                num_draft_tokens=len(drafts),
                num_accepted_tokens=accepted,
                num_invalid_spec_tokens=invalid,
                request_id=name,
            )
            if (request := self.requests.get(name)) and request.spec_decode_metrics is not None:
                request.spec_decode_metrics.observe(
                    num_draft_tokens=len(drafts) - (invalid or {}).get(name, 0),
                    num_accepted=accepted,
                    detailed=self.spec_decode_metrics_level == "detailed",
                )
        return {0: EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=stats))}


class Ours(StatsMixin, VLLMs):
    pads_drafts = True

    def step(self, number: int, accepted: dict[str, int], report=None, invalid=None, waiting=()):
        """Return vLLM's figures of one step."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict.fromkeys(accepted, 1 + NUM_PLANNED)
        output.scheduled_spec_decode_tokens = {name: [-1] * NUM_PLANNED for name in accepted}
        output.num_invalid_spec_tokens = invalid
        PLAN.attach(output, StepPlan(number, {}))
        for name in [*accepted, *waiting]:
            figures = RequestSpecDecodeMetrics.new(NUM_PLANNED)
            self.requests.setdefault(name, SimpleNamespace(spec_decode_metrics=figures))
        result = SimpleNamespace(
            req_id_to_index={name: place for place, name in enumerate(accepted)},
            sampled_token_ids=[[5] * (1 + count) for count in accepted.values()],
        )
        if report is not None:
            proposed = {name: RequestReport(count, 1, 0, 0) for name, count in report[1].items()}
            REPORT.attach_later(result, lambda: StepReport(report[0], proposed))
        outputs = self.update_from_output(output, result)
        return outputs[0].scheduler_stats.spec_decoding_stats

    def steps_of(self, name: str) -> list[tuple[int, int]]:
        """Return drafted and accepted tokens, by step."""
        figures = self.requests[name].spec_decode_metrics
        steps = list(zip(figures.per_step_drafted, figures.per_step_accepted))
        assert figures.num_draft_tokens == sum(drafted for drafted, _ in steps)
        counts = [accepted for _, accepted in steps]
        assert figures.histogram == [counts.count(n) for n in range(NUM_PLANNED + 1)]
        return steps


@pytest.fixture
def scheduler():
    return Ours()


def test_padding_is_neither_drafted_nor_accepted(scheduler):
    """For "c" only padding was verified, and one accepted."""
    stats = scheduler.step(4, {"a": 2, "b": 5, "c": 1}, (3, {"a": 4, "b": 3}))
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 7, 5)
    assert stats.num_accepted_tokens_per_pos == [2, 2, 1, 0, 0, 0]
    assert scheduler.steps_of("a") == [(4, 2)]
    assert scheduler.steps_of("b") == [(3, 3)]
    assert scheduler.steps_of("c") == []
    scheduler.step(5, {"a": 0, "c": 6}, (4, {"a": 1, "c": 6}))
    assert scheduler.steps_of("a") == [(4, 2), (1, 0)]
    assert scheduler.steps_of("c") == [(6, 6)]
    assert scheduler.step(6, {"c": 1}, (5, {})) is None
    assert scheduler.steps_of("c") == [(6, 6)]


def test_forbidden_tokens_are_not_drafted(scheduler):
    """Of five proposed tokens one is forbidden, beside one of padding."""
    stats = scheduler.step(4, {"a": 1}, (3, {"a": 5}), invalid={"a": 2})
    assert stats.num_draft_tokens == 4
    assert scheduler.steps_of("a") == [(4, 1)]


def test_a_waiting_proposal_is_counted_when_verified(scheduler):
    scheduler.step(4, {"a": 1}, (3, {"a": 2, "b": 3}), waiting=("b",))
    scheduler.step(5, {"b": 3}, (4, {}))
    assert scheduler.steps_of("b") == [(3, 3)]
    scheduler.step(6, {"b": 2}, (5, {}))
    assert scheduler.steps_of("b") == [(3, 3)], "it is not counted twice"


def test_without_the_report_of_the_step_before_vllms_figures_stand(scheduler):
    for report in (None, (2, {})):
        stats = scheduler.step(4, {"a": 2}, report)
        assert stats.num_draft_tokens == NUM_PLANNED
    assert scheduler.steps_of("a") == [(NUM_PLANNED, 2)] * 2


def test_levels_of_metrics(scheduler):
    scheduler.spec_decode_metrics_level = "summary"
    scheduler.step(4, {"a": 5}, (3, {"a": 3}))
    figures = scheduler.requests["a"].spec_decode_metrics
    assert (figures.num_draft_tokens, figures.histogram[3]) == (3, 1)
    assert figures.per_step_drafted == []
    scheduler.requests["a"].spec_decode_metrics = None
    scheduler.spec_decode_metrics_level = "none"
    assert scheduler.step(5, {"a": 5}, (4, {"a": 3})).num_draft_tokens == 3


def test_figures_are_copied():
    """A thread encodes outputs while later steps count on."""
    live = RequestSpecDecodeMetrics.new(NUM_PLANNED)
    request = SimpleNamespace(spec_decode_metrics=live, sampling_params=SimpleNamespace(stop=["."]))
    scheduler = SimpleNamespace(requests={"a": request}, spec_decode_metrics_level="detailed")
    for _ in range(3):
        live.observe(6, 2, detailed=True)
    output = EngineCoreOutput("a", [5])
    send_request_metrics(scheduler, {0: EngineCoreOutputs(outputs=[output])})
    live.observe(6, 2, detailed=True)
    sent = output.spec_decode_metrics
    assert (sent.num_draft_tokens, sent.histogram[2]) == (18, 3)
    assert (sent.per_step_drafted, sent.per_step_accepted) == ([6] * 3, [2] * 3)
