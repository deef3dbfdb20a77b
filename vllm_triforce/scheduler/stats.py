"""vLLM's own figures of speculation, without padding.

An asynchronous scheduler has as many tokens verified as were planned, and what was not proposed is
padding. vLLM would count it as drafted, and where the target says the padding itself, as accepted.
How much was proposed is in the report that comes with the same output (``core/plan.py``).

Level 3's counters, counted with vLLM's own ``vllm:spec_decode_*``.

A request that leaves while a step runs (its client has gone, or the front found a stop string in
the step before) takes that step's tokens with it, and vLLM leaves the step out of its figures. A
worker cannot tell, so what it counted of outcomes is replaced by what the scheduler counts.
"""

from typing import Any

from vllm_triforce.core.plan import plan_of, report_of
from vllm_triforce.metrics import carrier
from vllm_triforce.metrics.counters import LevelCounters


class PaddingStatsMixin:
    """Over an asynchronous scheduler of vLLM's: ``vllm:spec_decode_*`` and the figures of each
    request count what was proposed. Where the report of a step got lost, vLLM's own stand."""

    # The scheduler's own.
    requests: dict[str, Any]
    spec_decode_metrics_level: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._unverified: dict[str, int] = {}
        """Tokens that were proposed for requests that have not been scheduled since."""
        self._verified: dict[str, int] = {}
        """Of them, those that the present step has verified."""

    def update_from_output(self, scheduler_output, model_runner_output):
        self._verified = self._verified_in(scheduler_output, model_runner_output)
        counted = self._counted() if self.spec_decode_metrics_level != "none" else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for figures, proposed, histogram, num_drafted in counted:
            if figures.histogram != histogram:
                self._count_again(figures, proposed, histogram, num_drafted)
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats,
        num_draft_tokens,
        num_accepted_tokens,
        num_invalid_spec_tokens,
        request_id,
    ):
        if request_id in self._verified:
            # What a grammar forbids is at the end.
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
        plan, report = plan_of(scheduler_output), report_of(model_runner_output)
        if report is not None:
            alive = {name: n for name, n in self._unverified.items() if name in self.requests}
            self._unverified = alive | {
                name: its.num_tokens for name, its in report.proposed.items()
            }
        is_last = plan is not None and report is not None and report.number == plan.number - 1
        drafts, verified = scheduler_output.scheduled_spec_decode_tokens, {}
        for name in scheduler_output.num_scheduled_tokens:
            # Who proposes nothing is left out of a report.
            proposed = self._unverified.pop(name, 0 if is_last else None)
            if name in drafts and proposed is not None:
                verified[name] = min(proposed, len(drafts[name]))
        return verified

    def _counted(self) -> list[tuple[Any, int, list[int], int]]:
        """vLLM's figures of each request, what was proposed for it, and what they say before this
        step is counted: steps by accepted tokens, and drafted tokens."""
        found = []
        for name, proposed in self._verified.items():
            figures = getattr(self.requests.get(name), "spec_decode_metrics", None)
            if figures is not None:
                found.append((figures, proposed, list(figures.histogram), figures.num_draft_tokens))
        return found

    def _count_again(self, figures, proposed: int, histogram: list[int], num_drafted: int) -> None:
        """In the place of what vLLM has just counted for a request, who may have left by now: its
        output has the same object."""
        accepted = [now - before for now, before in zip(figures.histogram, histogram)].index(1)
        drafted = min(proposed, figures.num_draft_tokens - num_drafted)
        figures.histogram, figures.num_draft_tokens = histogram, num_drafted
        is_detailed = self.spec_decode_metrics_level == "detailed"
        if is_detailed:
            figures.per_step_accepted.pop()
            figures.per_step_drafted.pop()
        if drafted > 0:
            figures.observe(drafted, min(accepted, drafted), detailed=is_detailed)


# Fields of LevelCounters that LevelCounters.add_full_pass adds to.
_OUTCOMES = (
    "num_level3_steps",
    "num_level2_drafted",
    "num_level2_accepted",
    "num_level3_rejections",
)


class OutcomeStatsMixin:
    """Over a scheduler of vLLM's: counts outcomes of full passes as vLLM does, and sends figures of
    requests that may end by a stop string."""

    # The scheduler's own.
    requests: dict[str, Any]
    spec_decode_metrics_level: Any

    _outcomes = LevelCounters()
    """Outcomes of the present step."""

    def update_from_output(self, scheduler_output, model_runner_output):
        self._outcomes = LevelCounters()
        sent = carrier.attached(model_runner_output) or {}
        for name in _OUTCOMES:
            sent.pop(name, None)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._outcomes.num_level3_steps:
            carrier.put(outputs, {name: getattr(self._outcomes, name) for name in _OUTCOMES})
        if self.spec_decode_metrics_level != "none":
            self._send_figures_before_stop_strings(outputs)
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats,
        num_draft_tokens,
        num_accepted_tokens,
        num_invalid_spec_tokens,
        request_id,
    ):
        num_invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        self._outcomes.add_full_pass(num_draft_tokens - num_invalid, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def _send_figures_before_stop_strings(self, outputs) -> None:
        """Send figures with every output of a request that has stop strings: vLLM sends them with
        the last one, and which that is, the front finds out."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                request = self.requests.get(output.request_id)
                if request is not None and request.sampling_params.stop:
                    output.spec_decode_metrics = request.spec_decode_metrics
