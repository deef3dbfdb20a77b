"""Per-level figures for people: a line in the log at an interval, a dict from Python."""

import copy
import dataclasses
import time
from collections.abc import Callable

from vllm_triforce.metrics.counters import LevelCounters


class IntervalReport:
    """Logs what happened since the last line, as vLLM does for its speculative metrics.

    Args:
        interval: seconds between two lines; 0 is never.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last_time = time.monotonic()
        self._last = LevelCounters()

    def log_if_due(self, read: Callable[[], LevelCounters], logger) -> None:
        """``read`` gives the counters, and may have to wait for a device."""
        now = time.monotonic()
        if not self._interval or now - self._last_time < self._interval:
            return
        counters = read()
        recent = counters.since(self._last)
        self._last_time, self._last = now, copy.deepcopy(counters)
        if recent.num_proposals:
            logger.info("%s", summary(recent))


def summary(counters: LevelCounters) -> str:
    """One line of per-level figures."""
    spent = sum(counters.time_seconds.values()) or 1.0
    shares = ", ".join(
        f"{part} {100 * seconds / spent:.0f}%" for part, seconds in counters.time_seconds.items()
    )
    return (
        "TriForce metrics: "
        f"Mean acceptance length: {counters.mean_acceptance_length:.2f}, "
        f"Level 2: {counters.num_level2_accepted} of {counters.num_level2_drafted} tokens "
        f"accepted ({100 * counters.level2_acceptance_rate:.1f}%), "
        f"Level 1: {counters.num_level1_accepted} of {counters.num_level1_drafted} tokens "
        f"accepted ({100 * counters.level1_acceptance_rate:.1f}%), "
        f"{counters.num_inner_rounds} inner rounds, "
        f"Time in propose(): {spent:.2f} s ({shares})"
    )


def counters_of(llm) -> LevelCounters:
    """Counters of a running ``LLM`` (or any engine with ``collective_rpc``), from its first rank.

    Raises:
        ValueError: the engine does not run TriForce.
    """
    try:
        found = llm.collective_rpc("triforce_counters")[0]
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(
            "this engine has no TriForce counters; start it with "
            "speculative_config={'method': 'triforce'}"
        ) from error
    stored = {field.name for field in dataclasses.fields(LevelCounters)}
    return LevelCounters(**{key: value for key, value in found.items() if key in stored})
