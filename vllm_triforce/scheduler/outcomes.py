"""Level 3's counters, counted with vLLM's own ``vllm:spec_decode_*``.

A request that leaves while a step runs (its client has gone, or the front found a stop string in
the step before) takes that step's tokens with it, and vLLM leaves the step out of its figures. A
worker cannot tell, so what it counted of outcomes is replaced by what the scheduler counts.
"""

from typing import Any

from vllm_triforce.metrics import carrier
from vllm_triforce.metrics.counters import LevelCounters

# Fields of LevelCounters that LevelCounters.add_full_pass adds to.
_OUTCOMES = (
    "num_level3_steps",
    "num_level2_drafted",
    "num_level2_accepted",
    "num_level3_rejections",
)


class CountsOutcomes:
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
