"""Transport of the counters from a worker to the process that serves /metrics.

    worker: attach increments to the step's ModelRunnerOutput              CounterSender
    engine core: Scheduler.update_from_output puts them in SchedulerStats  put()
    front end: StatLoggerManager.record takes them out, to Prometheus      take()

There they stand next to vLLM's ``vllm:spec_decode_*``. Rates are left to the reader, as in vLLM:

    rate(vllm:triforce_level2_accepted_tokens_total[5m])
      / rate(vllm:triforce_level2_draft_tokens_total[5m])

vLLM's own messages carry the counters. They therefore arrive wherever vLLM's statistics do: with
several engines, several API servers (each step's statistics reach one of them) and several
machines. A step without speculation carries nothing.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from vllm_triforce.config.keys import METHOD
from vllm_triforce.metrics.counters import COUNTERS, PROPOSE_SECONDS, Counter, LevelCounters
from vllm_triforce.vllm_patches.patch import patch

# SchedulerStats is decoded by type. This field is a dict that accepts any name. Our entries are
# removed before vLLM reads it.
_FIELD = "num_kv_fetch_reqs_by_stage"
_PREFIX = "triforce:"
_SECONDS = "seconds:"
_MICROSECONDS = 1e6

_UNTIL = "`SchedulerStats` has a field for out-of-tree figures"

T = TypeVar("T")


class Message(Generic[T]):
    """Attribute of one of vLLM's messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    def attach(self, output, value: T) -> None:
        setattr(output, self._name, value)

    def attach_later(self, output, make_value: Callable[[], T]) -> None:
        """Attach the result of ``make_value()`` to a ModelRunnerOutput.

        ``get_output()`` of an asynchronous one calls it, after the device has finished the step.
        """
        if not hasattr(output, "get_output"):
            self.attach(output, make_value())
            return
        get_output = output.get_output

        def get_output_with_value():
            result = get_output()
            self.attach(result, make_value())
            return result

        output.get_output = get_output_with_value

    def of(self, output) -> T | None:
        return getattr(output, self._name, None)


INCREMENTS = Message[dict[str, int]]("triforce_counters")
"""Of a worker's counters, with a ModelRunnerOutput."""


def flatten(counters: LevelCounters) -> dict[str, int]:
    """Flatten counters to integers: seconds are microseconds, of a part under ``_SECONDS``."""
    numbers = dict(counters.__dict__)
    times = {_SECONDS + part: seconds for part, seconds in numbers.pop("time_seconds").items()}
    times |= {name: numbers[name] for name, row in COUNTERS.items() if row.unit == "seconds"}
    return numbers | {name: int(seconds * _MICROSECONDS) for name, seconds in times.items()}


class CounterSender:
    """Attaches a worker's counter increments to its outputs."""

    def __init__(self, counters: LevelCounters) -> None:
        self._counters = counters
        self._sent = flatten(counters)
        self._last_numbers: list = []

    def attach(self, output):
        """Attach the increments since the last call to an output, and return it."""
        # Times change only together with numbers, so steps without speculation return here.
        numbers = list(self._counters.__dict__.values())
        if output is None or numbers == self._last_numbers:
            return output
        if not getattr(output, "req_ids", True):
            return output  # vLLM's empty output is shared by all steps: wait for another one
        now, sent = flatten(self._counters), self._sent
        added = {name: n - sent.get(name, 0) for name, n in now.items() if n != sent.get(name, 0)}
        self._last_numbers, self._sent = numbers, now
        INCREMENTS.attach_later(output, lambda: added)
        return output


def put(outputs, added: dict[str, int]) -> None:
    """Put increments into the SchedulerStats of a step's EngineCoreOutputs."""
    for client_outputs in outputs.values():
        if (stats := client_outputs.scheduler_stats) is not None:
            carrier = getattr(stats, _FIELD)
            carrier |= {_PREFIX + name: value for name, value in added.items()}
            return


def take(stats) -> dict[str, int]:
    """Take increments out of a SchedulerStats, before vLLM reads it."""
    carrier = getattr(stats, _FIELD)
    names = [name for name in carrier if name.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): carrier.pop(name) for name in names}


class TriForcePrometheus:
    """Counters with vLLM's labels, ``model_name`` and ``engine``, by engine index.

    ``counter_cls`` is prometheus_client's Counter, or Ray's of the same interface.
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
        """Add a step's increments, as flattened by ``flatten()``."""
        for name, value in added.items():
            if name.startswith(_SECONDS):
                part = name.removeprefix(_SECONDS).replace(" ", "_")
                labels = self._labelvalues[engine_idx]
                self._seconds.labels(*labels, part).inc(value / _MICROSECONDS)
            elif (name, engine_idx) in self._counters:
                is_time = COUNTERS[name].unit == "seconds"
                self._counters[name, engine_idx].inc(value / _MICROSECONDS if is_time else value)


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
    if added := INCREMENTS.of(model_runner_output):
        put(outputs, added)
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
        self.triforce_prometheus = TriForcePrometheus.beside(self.stat_loggers)


@patch(
    "vllm.v1.metrics.loggers:StatLoggerManager.record",
    "self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx",
    why="takes the counters out again before any logger of vLLM sees them",
    until=_UNTIL,
)
def _out_of_scheduler_stats(
    original, self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=None
):
    # Managers of stock engines, or created before this patch, lack the attribute.
    prometheus = getattr(self, "triforce_prometheus", None)
    if prometheus is not None and scheduler_stats and (added := take(scheduler_stats)):
        prometheus.observe(added, engine_idx or 0)
    return original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
