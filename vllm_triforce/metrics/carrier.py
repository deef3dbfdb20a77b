"""The way of the counters from a worker to the process that answers /metrics.

    worker: what was added goes with the step's ModelRunnerOutput          CounterSender
    engine core: Scheduler.update_from_output puts it into SchedulerStats  put()
    front: StatLoggerManager.record takes it out, to Prometheus            take()

vLLM's own messages carry it, so it works wherever vLLM's statistics do: several engines, several
API servers (each step's statistics go to one of them), several machines. A step that speculated
on nothing carries nothing.
"""

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


def put(outputs, added: dict[str, int]) -> None:
    """Put counters into the SchedulerStats that go to a front with a step's EngineCoreOutputs."""
    for of_client in outputs.values():
        if (stats := of_client.scheduler_stats) is not None:
            carrier = getattr(stats, _FIELD)
            carrier |= {_PREFIX + name: value for name, value in added.items()}
            return


def take(stats) -> dict[str, int]:
    """Out of a SchedulerStats again, before vLLM's own readers see it."""
    carrier = getattr(stats, _FIELD)
    ours = [name for name in carrier if name.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): carrier.pop(name) for name in ours}


def attached(output) -> dict[str, int] | None:
    """What a worker attached to its output."""
    return getattr(output, _ATTRIBUTE, None)
