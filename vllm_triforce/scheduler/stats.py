"""Corrections of vLLM's speculation metrics (``vllm:spec_decode_*``) and of level 3's counters.

``PaddingStatsMixin``: an asynchronous scheduler pads proposals to their planned lengths. vLLM
counts the padding as drafted, and as accepted where the target emits the padding token. The report
in the same output gives the true lengths (``core/messages.py``).

Each scheduler's ``update_from_output()`` calls these in order (``v1.py``, ``v2.py``).

``OutcomeStatsMixin``: a request may leave during a step, because its client has gone or the front
end found a stop string. vLLM then discards the step's tokens and leaves them out of its metrics.
Workers do not see this, so the scheduler's counts of outcomes replace theirs.
"""

from dataclasses import replace
from typing import Any

from vllm_triforce.core.messages import plan_of, report_of
from vllm_triforce.metrics import carrier
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.scheduler import SchedulerBase


class PaddingStatsMixin(SchedulerBase):
    """Mixin for asynchronous schedulers: vLLM's speculation metrics leave out padding.

    If a step's report is missing, vLLM's counts stand.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._unverified: dict[str, int] = {}
        """Proposed tokens of requests that have not been scheduled since, by request id."""
        self._verified: dict[str, int] = {}
        """Proposed tokens that the current step verified, by request id."""
        self._snapshots: list[tuple[Any, int, list[int], int]] = []
        """``_request_metrics()`` before the current step."""

    def start_counting_padding(self, scheduler_output, model_runner_output) -> None:
        """Note the verified tokens of the step, before vLLM counts them."""
        self._verified, self._snapshots = {}, []
        drafts = scheduler_output.scheduled_spec_decode_tokens
        report = report_of(model_runner_output)
        if drafts or self._unverified or (report is not None and report.proposed):
            self._verified = self._verified_in(scheduler_output, model_runner_output)
        if self._verified and self.spec_decode_metrics_level != "none":
            self._snapshots = self._request_metrics()

    def remove_padding_from_request_metrics(self) -> None:
        """Count the step again for requests whose metrics vLLM has changed."""
        for metrics, proposed, histogram, num_drafted in self._snapshots:
            if metrics.histogram != histogram:
                self._recount(metrics, proposed, histogram, num_drafted)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats,
        num_draft_tokens,
        num_accepted_tokens,
        num_invalid_spec_tokens,
        request_id,
    ):
        if request_id in self._verified:
            # Tokens that a grammar rejects are at the end.
            num_draft_tokens -= (num_invalid_spec_tokens or {}).get(request_id, 0)
            num_draft_tokens = min(num_draft_tokens, self._verified[request_id])
            num_accepted_tokens = min(num_accepted_tokens, num_draft_tokens)
            num_invalid_spec_tokens = None
            if num_draft_tokens <= 0:
                return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def _verified_in(self, scheduler_output, model_runner_output) -> dict[str, int]:
        """Count the proposed tokens that the step verified, by request id."""
        plan, report = plan_of(scheduler_output), report_of(model_runner_output)
        if report is not None:
            alive = {
                request_id: n
                for request_id, n in self._unverified.items()
                if request_id in self.requests
            }
            self._unverified = alive | {
                request_id: proposal.num_tokens for request_id, proposal in report.proposed.items()
            }
        is_last = plan is not None and report is not None and report.number == plan.number - 1
        drafts, verified = scheduler_output.scheduled_spec_decode_tokens, {}
        for request_id in scheduler_output.num_scheduled_tokens:
            # A report leaves out requests without a proposal.
            proposed = self._unverified.pop(request_id, 0 if is_last else None)
            if request_id in drafts and proposed is not None:
                verified[request_id] = min(proposed, len(drafts[request_id]))
        return verified

    def _request_metrics(self) -> list[tuple[Any, int, list[int], int]]:
        """Snapshot vLLM's per-request metrics before the step is counted.

        Returns:
            For each verified request: the metrics object, the number of proposed tokens, and copies
            of the histogram of accepted tokens and of the number of drafted tokens.
        """
        return [
            (metrics, proposed, list(metrics.histogram), metrics.num_draft_tokens)
            for request_id, proposed in self._verified.items()
            if (metrics := getattr(self.requests.get(request_id), "spec_decode_metrics", None))
        ]

    def _recount(self, metrics, proposed: int, histogram: list[int], num_drafted: int) -> None:
        """Replace the counts that vLLM just added for a request by those without padding.

        The request may have left already; its output holds the same metrics object.
        """
        accepted = [now - before for now, before in zip(metrics.histogram, histogram)].index(1)
        drafted = min(proposed, metrics.num_draft_tokens - num_drafted)
        metrics.histogram, metrics.num_draft_tokens = histogram, num_drafted
        is_detailed = self.spec_decode_metrics_level == "detailed"
        if is_detailed:
            metrics.per_step_accepted.pop()
            metrics.per_step_drafted.pop()
        if drafted > 0:
            metrics.observe(drafted, min(accepted, drafted), detailed=is_detailed)


# Fields of LevelCounters that LevelCounters.add_full_pass() changes.
_OUTCOMES = (
    "num_level3_steps",
    "num_level2_drafted",
    "num_level2_accepted",
    "num_level3_rejections",
)


class OutcomeStatsMixin(SchedulerBase):
    """Mixin for vLLM's schedulers: counts outcomes of full passes as vLLM does."""

    _outcomes: LevelCounters | None = None
    """Outcomes of the current step; None without drafts."""

    def start_counting_outcomes(self, model_runner_output) -> None:
        """Drop the worker's counts of the step."""
        self._outcomes = None
        if sent := carrier.attached(model_runner_output):
            for name in _OUTCOMES:
                sent.pop(name, None)

    def send_outcomes(self, outputs) -> None:
        """Send the counts of ``make_spec_decoding_stats()``."""
        if self._outcomes is not None and self._outcomes.num_level3_steps:
            carrier.put(outputs, {name: getattr(self._outcomes, name) for name in _OUTCOMES})

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats,
        num_draft_tokens,
        num_accepted_tokens,
        num_invalid_spec_tokens,
        request_id,
    ):
        num_invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        if self._outcomes is None:
            self._outcomes = LevelCounters()
        self._outcomes.add_full_pass(num_draft_tokens - num_invalid, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )


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
                output.spec_decode_metrics = _copied(request.spec_decode_metrics)


def _copied(metrics):
    """Copy a request's metrics: a thread encodes outputs while later steps change them.

    Their lists have an entry for each step, so no entry is handled in Python.
    """
    if metrics is None:
        return None
    lists = {name: value[:] for name, value in vars(metrics).items() if isinstance(value, list)}
    return replace(metrics, **lists)
