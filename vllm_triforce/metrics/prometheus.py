"""TriForce's counters as Prometheus metrics, next to vLLM's ``vllm:spec_decode_*``.

Rates are left to the reader, as in vLLM:

    rate(vllm:triforce_level2_accepted_tokens_total[5m])
      / rate(vllm:triforce_level2_draft_tokens_total[5m])
"""

from vllm_triforce.metrics.carrier import SECONDS, to_seconds
from vllm_triforce.metrics.counters import COUNTERS, PROPOSE_SECONDS, Counter


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
        def family(row: Counter, *more_labels: str):
            return counter_cls(
                name=f"vllm:triforce_{row.metric}",
                documentation=row.help,
                labelnames=[*labelnames, *more_labels],
            )

        self._labelvalues = labelvalues
        self._seconds = family(PROPOSE_SECONDS, "part")
        self._counters = {}
        for name, row in COUNTERS.items():
            metric = family(row)
            for engine, values in labelvalues.items():
                self._counters[name, engine] = metric.labels(*values)

    @classmethod
    def beside(cls, stat_loggers: list) -> "TriForcePrometheus | None":
        """Create metrics with labels and counter class of vLLM's Prometheus logger, if any."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        for logger in stat_loggers:
            if isinstance(logger, PrometheusStatLogger):
                labelnames = ["model_name", "engine"]
                return cls(logger._counter_cls, labelnames, logger.per_engine_labelvalues)
        return None

    def observe(self, added: dict[str, int], engine_idx: int) -> None:
        """Add a step's increments, as flattened by ``carrier.flatten()``."""
        for name, value in added.items():
            if name.startswith(SECONDS):
                part = name.removeprefix(SECONDS).replace(" ", "_")
                labels = self._labelvalues[engine_idx]
                self._seconds.labels(*labels, part).inc(to_seconds(value))
            elif (name, engine_idx) in self._counters:
                is_time = COUNTERS[name].unit == "seconds"
                self._counters[name, engine_idx].inc(to_seconds(value) if is_time else value)
