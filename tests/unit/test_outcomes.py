"""Promise: TriForce's counters of full passes count what vLLM's count, and every answer carries its
own figures, however it ends."""

from functools import partial
from types import SimpleNamespace

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats

from tests.unit.wrapping import wrap
from vllm_triforce.metrics import carrier
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.scheduler.stats import OutcomeStatsMixin, send_request_metrics


class VLLMs:
    """vLLM's scheduler as far as it counts; a request that has left is not counted."""

    num_spec_tokens, log_stats, spec_decode_metrics_level = 6, True, "summary"
    make_spec_decoding_stats = Scheduler.make_spec_decoding_stats

    def __init__(self, **stop: list[str]) -> None:
        self.requests = {
            name: SimpleNamespace(
                spec_decode_metrics=RequestSpecDecodeMetrics.new(6),
                sampling_params=SimpleNamespace(stop=strings),
            )
            for name, strings in stop.items()
        }

    @partial(wrap, "Scheduler.update_from_output")
    def update_from_output(self, scheduler_output, model_runner_output):
        stats, outputs = None, []
        for name, (drafted, accepted) in scheduler_output.items():
            if name in self.requests:
                stats = self.make_spec_decoding_stats(stats, drafted, accepted, None, name)
                outputs.append(EngineCoreOutput(name, [5] * (1 + accepted)))
        sent = SchedulerStats(spec_decoding_stats=stats)
        return {0: EngineCoreOutputs(outputs=outputs, scheduler_stats=sent)}


class Ours(OutcomeStatsMixin, VLLMs):
    def update_from_output(self, scheduler_output, model_runner_output):
        self.start_counting_outcomes(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.send_outcomes(outputs)
        send_request_metrics(self, outputs)
        return outputs

    def step(self, **verified: tuple[int, int]):
        """Run a step that the worker has counted whole."""
        counters, result = LevelCounters(), SimpleNamespace(req_ids=list(verified))
        sender = carrier.CounterSender(counters)
        counters.add_proposal([[1, 2]])
        for drafted, accepted in verified.values():
            counters.add_full_pass(drafted, accepted)
        return self.update_from_output(verified, sender.attach(result))[0]


def test_a_step_of_a_request_that_has_left_is_counted_by_nobody():
    scheduler = Ours(a=[])
    stats = scheduler.step(a=(6, 2), gone=(6, 6)).scheduler_stats
    vllms = stats.spec_decoding_stats
    assert (vllms.num_drafts, vllms.num_draft_tokens, vllms.num_accepted_tokens) == (1, 6, 2)
    assert carrier.take(stats) == {
        "num_proposals": 1,
        "num_proposed": 2,
        "num_level3_steps": 1,
        "num_level2_drafted": 6,
        "num_level2_accepted": 2,
        "num_level3_rejections": 1,
    }
    stats = scheduler.step(gone=(6, 6)).scheduler_stats
    assert stats.spec_decoding_stats is None
    assert carrier.take(stats).keys() == {"num_proposals", "num_proposed"}


def test_requests_with_stop_strings_send_figures_with_every_output():
    """Figures are copied: a later step may be over before they are encoded."""
    scheduler = Ours(a=["."], b=[])
    by_name = {o.request_id: o for o in scheduler.step(a=(6, 2), b=(6, 2)).outputs}
    sent, live = (x["a"].spec_decode_metrics for x in (by_name, scheduler.requests))
    assert sent == live and by_name["b"].spec_decode_metrics is None
    live.observe(6, 2)
    assert (sent.num_draft_tokens, sum(sent.histogram)) == (0, 0) != (live.num_draft_tokens, 1)
    scheduler.spec_decode_metrics_level = "none"
    assert scheduler.step(a=(6, 2)).outputs[0].spec_decode_metrics is None


def test_figures_are_copied_without_a_look_at_each_step():
    """There is an entry for each step of the answer, and a copy for each output."""
    seen = []

    class Entry(int):
        def __deepcopy__(self, memo):
            seen.append(self)
            return self

    scheduler = Ours(a=["."])
    live = scheduler.requests["a"].spec_decode_metrics
    for _ in range(3):
        live.observe(Entry(6), Entry(2), detailed=True)
    (output,) = scheduler.step(a=(6, 2)).outputs
    live.observe(6, 2, detailed=True)
    assert output.spec_decode_metrics.per_step_accepted == [2] * 3
    assert output.spec_decode_metrics.per_step_drafted == [6] * 3 and not seen
