"""Corrections of vLLM's speculation metrics (``vllm:spec_decode_*``) and of level 3's counters.

Padding: an asynchronous scheduler pads proposals to their planned lengths. vLLM counts the padding
as drafted, and as accepted where the target emits the padding token. The report in the same output
gives the true lengths (``core/messages.py``).

Outcomes: a request may leave during a step, because its client has gone or the front end found a
stop string. vLLM then discards the step's tokens and leaves them out of its metrics. Workers do not
see this, so the scheduler's counts of outcomes replace theirs.
"""

from dataclasses import replace
from typing import Any

from vllm_triforce.core.messages import PLAN, REPORT, StepReport
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.scheduler import SchedulerBase
from vllm_triforce.vllm_patches import carrier

# Fields of LevelCounters that LevelCounters.add_full_pass() changes.
_OUTCOMES = (
    "num_level3_steps",
    "num_level2_drafted",
    "num_level2_accepted",
    "num_level3_rejections",
)


class StatsMixin(SchedulerBase):
    """Mixin for vLLM's schedulers: counts outcomes of full passes as vLLM does, without padding."""

    pads_drafts = False
    """True if drafts of a step may be padding. If a step's report is missing, vLLM's counts stand.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.step_counts = LevelCounters()
        """Counts of the current step."""
        self._unverified: dict[str, int] = {}
        """Proposed tokens of requests that have not been scheduled since, by request id."""
        self._verified: dict[str, int] = {}
        """Proposed tokens that the current step verified, by request id."""
        self._recounts: list[tuple[Any, tuple[int, int], tuple[int, int]]] = []
        """Requests' metrics with drafted and accepted tokens: vLLM's, and those without padding."""

    def update_from_output(self, scheduler_output, model_runner_output):
        # The worker's counts of the step are replaced.
        if sent := carrier.INCREMENTS.of(model_runner_output):
            for name in _OUTCOMES:
                sent.pop(name, None)
        if self.pads_drafts:
            self._verified, self._recounts = {}, []
            self._note_verified(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        added = {name: n for name, n in carrier.flatten(self.step_counts).items() if n}
        self.step_counts = LevelCounters()
        carrier.put(outputs, added)
        self._remove_padding()
        send_request_metrics(self, outputs)
        return outputs

    def _note_verified(self, scheduler_output, model_runner_output) -> None:
        plan, report = PLAN.of(scheduler_output), REPORT.of(model_runner_output) or StepReport(-2)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if not (drafts or self._unverified or report.proposed):
            return
        self._unverified |= {
            request_id: proposal.num_tokens for request_id, proposal in report.proposed.items()
        }
        for request_id in self._unverified.keys() - self.requests.keys():
            del self._unverified[request_id]
        is_last = plan is not None and report.number == plan.number - 1
        for request_id in scheduler_output.num_scheduled_tokens:
            # A report leaves out requests without a proposal.
            proposed = self._unverified.pop(request_id, 0 if is_last else None)
            if request_id in drafts and proposed is not None:
                self._verified[request_id] = min(proposed, len(drafts[request_id]))

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats,
        num_draft_tokens,
        num_accepted_tokens,
        num_invalid_spec_tokens,
        request_id,
    ):
        # Tokens that a grammar rejects are at the end.
        num_valid = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if request_id in self._verified:
            counted = num_valid, num_accepted_tokens
            num_valid = num_draft_tokens = min(num_valid, self._verified[request_id])
            num_accepted_tokens = min(num_accepted_tokens, num_valid)
            num_invalid_spec_tokens = None
            # vLLM is about to count the step in the request's own metrics.
            if metrics := self.requests[request_id].spec_decode_metrics:
                self._recounts.append((metrics, counted, (num_valid, num_accepted_tokens)))
            if num_valid <= 0:
                return spec_decoding_stats
        self.step_counts.add_full_pass(num_valid, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def _remove_padding(self) -> None:
        """Count the step again in metrics of requests, whose outputs hold the same objects."""
        is_detailed = self.spec_decode_metrics_level == "detailed"
        for metrics, (padded, emitted), (drafted, accepted) in self._recounts:
            metrics.histogram[emitted] -= 1
            metrics.num_draft_tokens -= padded
            if is_detailed:
                metrics.per_step_accepted.pop()
                metrics.per_step_drafted.pop()
            if drafted > 0:
                metrics.observe(drafted, accepted, detailed=is_detailed)


def send_request_metrics(scheduler, outputs) -> None:
    """Add metrics of requests with stop strings to all of their outputs.

    vLLM sends per-request metrics with a request's last output. A stop string is found by the front
    end, in any output.
    """
    if scheduler.spec_decode_metrics_level == "none":
        return
    for client_outputs in outputs.values():
        for output in client_outputs.outputs:
            request = scheduler.requests.get(output.request_id)
            if request and (params := request.sampling_params) and params.stop:
                # A copy: a thread encodes outputs while later steps change the metrics. Their lists
                # have an entry for each step, so no entry is handled in Python.
                if (metrics := request.spec_decode_metrics) is not None:
                    lists = {n: v[:] for n, v in vars(metrics).items() if isinstance(v, list)}
                    metrics = replace(metrics, **lists)
                output.spec_decode_metrics = metrics
