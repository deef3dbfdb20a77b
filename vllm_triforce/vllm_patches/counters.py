"""Patches that carry the counters in vLLM's messages (``metrics/carrier.py``)."""

from vllm_triforce.config.keys import METHOD
from vllm_triforce.metrics import carrier
from vllm_triforce.vllm_patches.patch import patch

_UNTIL = "`SchedulerStats` has a field for out-of-tree figures"


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    "self, scheduler_output, model_runner_output",
    why="puts the counters attached to a worker's output into `SchedulerStats`, as `triforce:...` "
    "keys of the dict `num_kv_fetch_reqs_by_stage`: messages are decoded by type, and this field "
    "accepts any key",
    until=_UNTIL,
)
def _into_scheduler_stats(original, self, scheduler_output, model_runner_output, *args, **kwargs):
    outputs = original(self, scheduler_output, model_runner_output, *args, **kwargs)
    if added := carrier.INCREMENTS.of(model_runner_output):
        carrier.put(outputs, added)
    return outputs


@patch(
    "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    None,
    why="registers our Prometheus counters. The entry point `vllm.stat_logger_plugins` does not "
    "serve: its presence turns statistics on under `--disable-log-stats`",
    until=_UNTIL,
)
def _with_prometheus(original, self, vllm_config, *args, **kwargs):
    original(self, vllm_config, *args, **kwargs)
    if isinstance(vllm_config.additional_config, dict) and (
        METHOD in vllm_config.additional_config
    ):
        self.triforce_prometheus = carrier.TriForcePrometheus.beside(self.stat_loggers)


@patch(
    "vllm.v1.metrics.loggers:StatLoggerManager.record",
    "self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx",
    why="takes the counters out again before any logger of vLLM sees them",
    until=_UNTIL,
)
def _out_of_scheduler_stats(original, self, *args, **kwargs):
    # Managers of stock engines, or created before this patch, lack the attribute.
    if (prometheus := getattr(self, "triforce_prometheus", None)) is not None:
        _observe(prometheus, *args, **kwargs)
    return original(self, *args, **kwargs)


def _observe(
    prometheus, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=None
) -> None:
    """Move our counters from the arguments of ``record()`` to Prometheus."""
    if scheduler_stats and (added := carrier.take(scheduler_stats)):
        prometheus.observe(added, engine_idx or 0)
