"""Per-level metrics for users: a log line at an interval, and counters read from Python."""

import copy
import dataclasses
import math
import time

from vllm_triforce.metrics.counters import LevelCounters


class IntervalReport:
    """Logs per-level metrics at an interval, as vLLM logs its speculation metrics."""

    def __init__(self, interval: float) -> None:  # in seconds; 0 disables the log
        self._interval = interval
        self._last = LevelCounters()
        self.due_at = time.monotonic() + interval if interval else math.inf
        """Time of the next line, by ``time.monotonic()``."""

    def log(self, counters: LevelCounters, logger) -> None:
        """Log the metrics since the last line, if anything was proposed."""
        recent = counters.since(self._last)
        self.due_at, self._last = time.monotonic() + self._interval, copy.deepcopy(counters)
        if recent.num_proposals:
            logger.info("%s", summary(recent))


def summary(counters: LevelCounters) -> str:
    total_s = sum(counters.time_seconds.values()) or 1.0
    shares = ", ".join(
        f"{part} {100 * seconds / total_s:.0f}%" for part, seconds in counters.time_seconds.items()
    )
    return (
        "TriForce metrics: "
        f"Mean acceptance length: {counters.mean_acceptance_length:.2f}, "
        f"Level 2: {counters.num_level2_accepted} of {counters.num_level2_drafted} tokens "
        f"accepted ({100 * counters.level2_acceptance_rate:.1f}%), "
        f"Level 1: {counters.num_level1_accepted} of {counters.num_level1_drafted} tokens "
        f"accepted ({100 * counters.level1_acceptance_rate:.1f}%), "
        f"{counters.num_inner_rounds} inner rounds, "
        f"Time in propose(): {total_s:.2f} s ({shares})"
    )


def counters_of(llm) -> LevelCounters:
    """Read the counters of a running ``LLM``, or any engine with ``collective_rpc``, from rank 0.

    Raises:
        ValueError: the engine does not run TriForce.
    """
    try:
        values = llm.collective_rpc("triforce_counters")[0]
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(
            "this engine has no TriForce counters. Start it with "
            "speculative_config={'method': 'triforce'}."
        ) from error
    stored = {field.name for field in dataclasses.fields(LevelCounters)}
    return LevelCounters(**{key: value for key, value in values.items() if key in stored})
