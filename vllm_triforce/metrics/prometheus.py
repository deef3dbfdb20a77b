"""The per-level counters as Prometheus metrics, beside vLLM's ``vllm:spec_decode_*``.

Rates are left to the reader, as vLLM leaves them:

    rate(vllm:triforce_level2_accepted_tokens_total[5m])
      / rate(vllm:triforce_level2_draft_tokens_total[5m])
"""

from vllm_triforce.metrics.carrier import SECONDS, to_seconds

# By field of LevelCounters: name (Prometheus appends _total) and description.
_COUNTERS = {
    "num_level1_drafted": ("level1_draft_tokens", "Tokens drafted by level 1."),
    "num_level1_accepted": ("level1_accepted_tokens", "Level 1's tokens that level 2 accepted."),
    "num_inner_rounds": ("inner_rounds", "Level 2 passes, times requests in each."),
    "num_level2_passes": ("level2_passes", "Level 2 passes, each for a whole batch."),
    "num_proposals": ("proposals", "Proposals made, times requests in each."),
    "num_proposed": ("proposed_tokens", "Tokens handed up by level 2, verified or not."),
    "num_level2_drafted": ("level2_draft_tokens", "Level 2's tokens that level 3 verified."),
    "num_level2_accepted": ("level2_accepted_tokens", "Level 2's tokens that level 3 accepted."),
    "num_level3_steps": ("level3_steps", "Full passes that verified a proposal, times requests."),
    "num_level3_rejections": ("level3_rejections", "Proposals of which level 3 rejected a token."),
    "num_direct_proposals": (
        "direct_proposals",
        "Proposals of level 1 that level 2 did not see, among vllm:triforce_proposals.",
    ),
    "num_nan_requests": (
        "nan_requests",
        "Requests that went on without speculation because a level's logits had a NaN.",
    ),
    "num_staged_bytes": ("staged_bytes", "KV in host memory that full passes read, a rank."),
    "num_pool_blocks": ("pool_blocks", "Blocks of KV in host memory that level 2 was to read."),
    "num_pool_hits": ("pool_hits", "Of vllm:triforce_pool_blocks, those that were on the device."),
    "num_pool_bytes": ("pool_bytes", "KV in host memory brought for level 2, a rank."),
    "num_boundary_faults": (
        "boundary_faults",
        "Proposals that were verified as certain because what belongs to them was not right.",
    ),
}
_SECONDS = ("propose_seconds", "Seconds spent proposing, by part.")


class TriForcePrometheus:
    """Counters with vLLM's labels, ``model_name`` and ``engine``.

    Args:
        counter_cls: prometheus_client's Counter, or Ray's of the same interface.
        labelnames: vLLM's.
        labelvalues: vLLM's, by engine index.
    """

    def __init__(
        self, counter_cls, labelnames: list[str], labelvalues: dict[int, list[object]]
    ) -> None:
        def counter(name: str, documentation: str, *more_labels: str):
            return counter_cls(
                name=f"vllm:triforce_{name}",
                documentation=documentation,
                labelnames=[*labelnames, *more_labels],
            )

        self._labelvalues = labelvalues
        self._seconds = counter(*_SECONDS, "part")
        self._counters = {}
        for field, (name, documentation) in _COUNTERS.items():
            family = counter(name, documentation)
            for engine, values in labelvalues.items():
                self._counters[field, engine] = family.labels(*values)

    @classmethod
    def beside(cls, stat_loggers: list) -> "TriForcePrometheus | None":
        """With the labels and the kind of counter of vLLM's own Prometheus logger, if there."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        for logger in stat_loggers:
            if isinstance(logger, PrometheusStatLogger):
                labelnames = ["model_name", "engine"]
                return cls(logger._counter_cls, labelnames, logger.per_engine_labelvalues)
        return None

    def observe(self, added: dict[str, int], engine_idx: int) -> None:
        """Adds what a step added, in the form of ``carrier.flat``."""
        for name, value in added.items():
            if name.startswith(SECONDS):
                part = name.removeprefix(SECONDS).replace(" ", "_")
                labels = self._labelvalues[engine_idx]
                self._seconds.labels(*labels, part).inc(to_seconds(value))
            elif (name, engine_idx) in self._counters:
                self._counters[name, engine_idx].inc(value)
