"""Measure passes at start-up, for the cost model (``controller/cost_model.py``).

A runner supplies its passes, and the lengths and contexts at which they are measured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

# Tokens of context at which attention takes next to no time.
NO_CONTEXT = 16
# Batch sizes of full passes of a token each.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class PassTimer:
    """Times passes."""

    repeats: int
    """Runs after the first one, which warms up; without repeats the first one counts."""
    choose: Callable[[list[float]], float]  # from the seconds of all repeats to those of the pass
    synchronize: Callable[[], None] = lambda: None  # waits for the device

    def all_seconds(self, runs: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
        """Return the seconds of each of ``runs``.

        Runs take turns, so that a short disturbance does not slow all repeats of one.
        """
        seconds: dict[Any, list[float]] = {name: [] for name in runs}
        for _ in range(1 + self.repeats):
            for name, run in runs.items():
                self.synchronize()
                start = time.perf_counter()
                run()
                self.synchronize()
                seconds[name].append(time.perf_counter() - start)
        return {name: self.choose(times[1:] or times) for name, times in seconds.items()}

    def seconds(self, run: Callable[..., object], *args) -> float:
        return self.all_seconds({"": partial(run, *args)})[""]


def measure_full_passes(
    timer: PassTimer,
    run: Callable[[int, int, int], object],
    max_reqs: int,
    tokens: Sequence[int],
    contexts: Sequence[int],
) -> tuple[Points, list[tuple[float, Points]]]:
    """Measure ``full_by_rows`` and ``full_by_tokens`` of ``Measurements``.

    Args:
        run: runs a pass of (requests, tokens of each, context of each).
        tokens, contexts: of the passes of one request.
    """
    rows = [n for n in _ROWS if n <= max_reqs]
    passes = [(n, 1, NO_CONTEXT) for n in rows] + [(1, q, c) for q in tokens for c in contexts]
    seconds = timer.all_seconds({args: partial(run, *args) for args in passes})
    by_rows: Points = list(zip(rows, rising([seconds[n, 1, NO_CONTEXT] for n in rows])))
    # Numbers stay whole: the log line of the start-up tells them (``controller/describe.py``).
    return by_rows, [(q, [(c, seconds[1, q, c]) for c in contexts]) for q in tokens]


def measure_draft(seconds_of_pass: Callable[[int], float], max_reqs: int) -> tuple[float, float]:
    """Measure the draft model's pass: seconds for one request, and for each further one."""
    one_s, num_reqs = seconds_of_pass(1), min(4, max_reqs)
    if num_reqs == 1:
        return one_s, 0.0
    return one_s, max(0.0, seconds_of_pass(num_reqs) - one_s) / (num_reqs - 1)


def rising(seconds: Sequence) -> list:
    """Raise seconds until none falls along any axis: larger passes never take less time.

    Through noise, the cost model would extrapolate to 0.
    """
    table = np.asarray(seconds)
    for axis in range(table.ndim):
        table = np.maximum.accumulate(table, axis=axis)
    return table.tolist()
