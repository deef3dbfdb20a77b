"""What is measured: passes at start-up, and steps as they end."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Piecewise linear through sorted ``points``; beyond the last two, their line goes on.

    Below the first point its value is taken.
    """
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    end = min(max(1, bisect_right(points, (at, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[end - 1], points[end]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


# Share of a single token's attention that further tokens have to add, before it is looked at what
# company does to that.
_MATTERS = 0.05


@dataclass
class Measurements:
    """Seconds of passes at start-up; every list is sorted."""

    full_by_rows: list[tuple[float, float]]
    """(requests, seconds) of a full pass of one token each, with next to no context."""
    full_by_tokens: list[tuple[float, list[tuple[float, float]]]]
    """(tokens, [(context, seconds)]) of a full pass of one request, at the same contexts."""
    level2_by_tokens: list[tuple[float, float]]
    """(tokens, seconds) of a pass of level 2 of one request, over a full budget."""
    level2_per_row: float
    """Seconds that another request adds to a pass of level 2."""
    draft: float = 0.0
    """Seconds of the draft's pass for one request."""
    draft_per_row: float = 0.0
    draft_per_token: float = 0.0
    """Seconds that the draft takes for a token that it has to read first."""
    selection_per_token: float = 0.0
    """Seconds that a request's first selection takes for a token of context."""
    sampling: float = 0.0
    """Seconds that a row of logits takes to become a distribution (temperature, top-p)."""
    of_several: list[tuple[float, float, float]] = field(default_factory=list)
    """(requests, seconds, seconds) of a full pass of several requests at ``context_of_several``, of
    one token each and of as many as ``full_by_tokens`` ends with. Empty where what contexts add is
    the sum of what each adds alone."""
    context_of_several: float = 0.0
    _attention: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {its.name: getattr(self, its.name) for its in fields(self) if its.init}

    def attention(self, max_tokens: int) -> np.ndarray:
        """[contexts, at least ``max_tokens`` + 1], seconds that each measured context adds to a
        pass of so many tokens."""
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
    def company(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """(requests, factor): what the contexts of several requests add to a pass together, over
        what they add alone; of single tokens, and of what further tokens add to that."""
        plain, further = [(1.0, 1.0)], [(1.0, 1.0)]
        most = int(self.full_by_tokens[-1][0])
        table = self.attention(most)
        one, longest = (
            float(np.interp(self.context_of_several, self.contexts, table[:, q])) for q in (1, most)
        )
        for count, seconds, seconds_of_longest in self.of_several:
            linear, linear_of_longest = (
                interpolate(self.full_by_rows, count * q) for q in (1, most)
            )
            if one > 0:
                plain.append((count, _factor(seconds - linear, count * one)))
            if longest - one > _MATTERS * one:
                more = (seconds_of_longest - linear_of_longest) - (seconds - linear)
                further.append((count, _factor(more, count * (longest - one))))
        return _rising(plain), _rising(further)

    @cached_property
    def contexts(self) -> np.ndarray:
        """[contexts], the measured ones."""
        return np.array([context for context, _ in self.full_by_tokens[0][1]], dtype=np.float64)


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What more requests take together is not less, whatever the clock said."""
    most, found = 0.0, []
    for count, factor in points:
        most = max(most, count * factor)
        found.append((count, most / count))
    return found


def _factor(together: float, alone: float) -> float:
    """Never far from what is plausible, however badly it was measured."""
    return min(1.5, max(0.0, together / alone))


@dataclass
class StepTime:
    """A step of decoding that is over."""

    is_greedy: bool
    """Whether all requests are."""
    tokens: list[int]
    """Of each request."""
    contexts: list[int]
    """Tokens of each request."""
    seconds: float
    """Without the proposal that was made in it, for the step after."""
    num_drafts: int = 0
    proposal_seconds: float = 0.0
    """Of the proposal that was verified in it."""
    planned_seconds: float = 0.0
    """What that proposal and verifying it were expected to add."""
    is_reevaluation: bool = False
    """Whether it interrupted plain decoding for a decision, to which ``seconds`` belongs."""
