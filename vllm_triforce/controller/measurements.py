"""Measured seconds: of passes at start-up, and of steps as they end, with their sums."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

# Share of a token's attention below which the attention of further tokens is noise.
_MIN_FURTHER = 0.05
# Largest plausible factor on the sum of the requests' attention alone.
_MAX_SCALE = 1.5


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate linearly between sorted ``points``.

    The last two are extrapolated; below the first point its value is taken.
    """
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    end = min(max(1, bisect_right(points, (at, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[end - 1], points[end]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass
class Measurements:
    """Seconds of passes at start-up; every list is sorted."""

    full_by_rows: list[tuple[float, float]]
    """(requests, seconds) of a full pass of one token each, with next to no context."""
    full_by_tokens: list[tuple[float, list[tuple[float, float]]]]
    """(tokens, [(context, seconds)]) of a full pass of one request, at the same contexts."""
    level2_by_tokens: list[tuple[float, float]]
    """(tokens, seconds) of a pass of level 2 of one request, at the first context below."""
    level2_by_batch: list[tuple[float, list[tuple[float, float]]]]
    """(requests, [(context, seconds)]) of a pass of level 2, at the same contexts."""
    draft: float = 0.0
    """Seconds of the draft model's pass for one request."""
    draft_per_row: float = 0.0
    test_per_token: float = 0.0
    """Seconds that level 3's test of a sampled draft token takes, in proportion to the vocabulary;
    0 where a device makes them nothing."""
    full_by_num_reqs: list[tuple[float, float, float]] = field(default_factory=list)
    """(requests, seconds, seconds) of a full pass of several requests at ``full_context``:
    of one token each, and of the largest number in ``full_by_tokens``. Empty where a batch's
    attention is the sum over its requests."""
    full_context: float = 0.0
    _attention: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the measured values, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @cached_property
    def contexts(self) -> np.ndarray:
        """Measured contexts, [num_contexts]."""
        return np.array([context for context, _ in self.full_by_tokens[0][1]], dtype=np.float64)

    def level2(self, num_reqs: float, num_tokens: float, context: float) -> float:
        """Return the seconds of a pass of level 2 of ``num_tokens`` a request."""
        by_reqs = [(n, interpolate(points, context)) for n, points in self.level2_by_batch]
        more_s = interpolate(by_reqs, num_reqs) - self.level2_by_batch[0][1][0][1]
        return max(0.0, interpolate(self.level2_by_tokens, num_tokens) + more_s)

    def attention(self, max_tokens: int) -> np.ndarray:
        """Return the seconds that contexts add to passes of 0, 1 ... tokens.

        Returns:
            [num_contexts, at least ``max_tokens`` + 1]
        """
        if self._attention is None or self._attention.shape[1] <= max_tokens:
            tokens = [q for q, _ in self.full_by_tokens]
            by_context = zip(*([s for _, s in points] for _, points in self.full_by_tokens))
            table = np.array(
                [
                    [interpolate(list(zip(tokens, seconds)), q) for q in range(max_tokens + 1)]
                    for seconds in by_context
                ]
            )
            self._attention = table - table[0]
        return self._attention

    @cached_property
    def attention_scales(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """(requests, factor on the sum of the requests' attention alone).

        The first list is of single tokens, the second of the further tokens of verification.
        """
        first, further = [(1.0, 1.0)], [(1.0, 1.0)]
        longest = int(self.full_by_tokens[-1][0])
        table = self.attention(longest)
        one_s, longest_s = (
            float(np.interp(self.full_context, self.contexts, table[:, q])) for q in (1, longest)
        )
        for count, seconds, seconds_of_longest in self.full_by_num_reqs:
            rows_s, rows_of_longest_s = (
                interpolate(self.full_by_rows, count * q) for q in (1, longest)
            )
            if one_s > 0:
                first.append((count, _scale(seconds - rows_s, count * one_s)))
            if longest_s - one_s > _MIN_FURTHER * one_s:
                more_s = (seconds_of_longest - rows_of_longest_s) - (seconds - rows_s)
                further.append((count, _scale(more_s, count * (longest_s - one_s))))
        return _rising(first), _rising(further)


def _scale(batch_s: float, sum_s: float) -> float:
    return min(_MAX_SCALE, max(0.0, batch_s / sum_s))


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Raise factors until no batch takes less than a smaller one: timings are noisy."""
    sums = np.maximum.accumulate([count * factor for count, factor in points]).tolist()
    return [(count, total / count) for (count, _), total in zip(points, sums)]


@dataclass
class StepTime:
    """A step of decoding that has ended."""

    is_greedy: bool
    """True if all requests are."""
    tokens: list[int]
    """Verified tokens of each request, the newest one included."""
    contexts: list[int]
    """Tokens of context of each request."""
    seconds: float
    """Without the proposal made in it, which belongs to the next step."""
    num_drafts: int = 0
    proposal_seconds: float = 0.0
    """Of the proposal that this step verified."""
    num_accepted: int = 0
    """Accepted drafts of all requests."""
    planned_seconds: float = 0.0
    """Planned seconds of that proposal and its verification."""
    num_verifying: int = 0
    """Requests with a proposal, those without a token of it left out."""
    has_seed: bool = False
    """True if a request has a seed."""

    def break_even(self, seconds: float, plain_s: float) -> tuple[float, float]:
        """Return the seconds of the step, and of a plain one, that its break-even compares.

        In a step of ``n`` requests, ``m`` of them with a proposal, that takes ``T`` seconds in
        place of ``plain``, speculation pays if the ``m`` requests gain as much as all ``n`` wait:
        from ``1 + n / m * (T / plain - 1)`` tokens a step. The ratio of sums is the mean of this.
        """
        at_least = self.num_verifying * plain_s
        waited = len(self.tokens) * (seconds - plain_s)
        return max(0.0, at_least + waited), at_least
