"""The way of the counters from a worker to the process that answers /metrics.

    worker: what was added goes with the step's ModelRunnerOutput          CounterSender
    engine core: Scheduler.update_from_output puts it into SchedulerStats  to_wrap()
    front: StatLoggerManager.record takes it out, to Prometheus            to_wrap()

vLLM's own messages carry it, so it works wherever vLLM's statistics do: several engines, several
API servers (each step's statistics go to one of them), several machines. A step that speculated
on nothing carries nothing.
"""

import sys
from collections.abc import Callable

from vllm_triforce.config.triforce_config import METHOD
from vllm_triforce.metrics.counters import LevelCounters

# Attribute of a ModelRunnerOutput.
_ATTRIBUTE = "triforce_counters"
# SchedulerStats is decoded by type: of its fields, this is a dict that takes any name, and whose
# readers ask for theirs only. It is emptied of ours before any of them sees it.
_FIELD = "num_kv_fetch_reqs_by_stage"
_PREFIX = "triforce:"
SECONDS = "seconds:"
_MICROSECONDS = 1e6


def flat(counters: LevelCounters) -> dict[str, int]:
    """Every counter as an integer; times in microseconds, under ``SECONDS`` and their part."""
    numbers = dict(counters.__dict__)
    for part, seconds in numbers.pop("time_seconds").items():
        numbers[SECONDS + part] = int(seconds * _MICROSECONDS)
    return numbers


def to_seconds(microseconds: int) -> float:
    return microseconds / _MICROSECONDS


class CounterSender:
    """Attaches what was added since the last time to a worker's outputs."""

    def __init__(self, counters: LevelCounters) -> None:
        self._counters = counters
        self._sent = flat(counters)
        self._seen: list = []

    def attach(self, output):
        """``output``, a (maybe asynchronous) ModelRunnerOutput or None, with what is new."""
        # Times are one dict, and change only beside numbers: steps without speculation end here.
        numbers = list(self._counters.__dict__.values())
        if output is None or numbers == self._seen:
            return output
        if not getattr(output, "req_ids", True):
            return output  # vLLM's empty output is one object for all: what is new can wait
        self._seen, now = numbers, flat(self._counters)
        if now == self._sent:
            return output
        added = {
            name: value - self._sent.get(name, 0)
            for name, value in now.items()
            if value != self._sent.get(name, 0)
        }
        self._sent = now
        if hasattr(output, "get_output"):
            return _attach_later(output, added)
        setattr(output, _ATTRIBUTE, added)
        return output


def _attach_later(output, added: dict[str, int]):
    get_output = output.get_output

    def get_output_with_counters():
        result = get_output()
        setattr(result, _ATTRIBUTE, added)
        return result

    output.get_output = get_output_with_counters
    return output


def to_wrap(engine_process: bool) -> list[tuple[type, str, Callable]]:
    """Methods of the scheduler and the statistics' manager, which fall through without counters.

    Args:
        engine_process: False where it is not known that an engine will run here: what vLLM has
            not loaded is then left alone.

    Returns:
        The owner of each, its name and the wrapper.
    """
    found: list[tuple[type, str, Callable]] = []
    if engine_process or "vllm.v1.engine.core" in sys.modules:
        from vllm.v1.core.sched.scheduler import Scheduler

        found.append((Scheduler, "update_from_output", _into_scheduler_stats))
    if engine_process or "vllm.v1.metrics.loggers" in sys.modules:
        from vllm.v1.metrics.loggers import StatLoggerManager

        found.append((StatLoggerManager, "__init__", _with_prometheus))
        found.append((StatLoggerManager, "record", _out_of_scheduler_stats))
    return found


def _into_scheduler_stats(original):
    def update_from_output(self, scheduler_output, model_runner_output, *args, **kwargs):
        outputs = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        added = getattr(model_runner_output, _ATTRIBUTE, None)
        if added:
            for engine_core_outputs in outputs.values():
                stats = engine_core_outputs.scheduler_stats
                if stats is not None:
                    carrier = getattr(stats, _FIELD)
                    carrier |= {_PREFIX + name: value for name, value in added.items()}
                    break
        return outputs

    return update_from_output


def _with_prometheus(original):
    def __init__(self, vllm_config, *args, **kwargs):
        original(self, vllm_config, *args, **kwargs)
        self.triforce_prometheus = None
        if isinstance(vllm_config.additional_config, dict) and (
            METHOD in vllm_config.additional_config
        ):
            from vllm_triforce.metrics.prometheus import TriForcePrometheus

            self.triforce_prometheus = TriForcePrometheus.beside(self.stat_loggers)

    return __init__


def _out_of_scheduler_stats(original):
    def record(self, scheduler_stats, *args, engine_idx=None, **kwargs):
        if self.triforce_prometheus is not None and scheduler_stats is not None:
            carrier = getattr(scheduler_stats, _FIELD)
            ours = [name for name in carrier if name.startswith(_PREFIX)]
            if ours:
                added = {name.removeprefix(_PREFIX): carrier.pop(name) for name in ours}
                self.triforce_prometheus.observe(added, engine_idx or 0)
        return original(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

    return record
