"""What a pass costs: measured at start-up, corrected by what steps really take."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Piecewise linear through sorted ``points``; beyond the last two, their line goes on.

    Below the first point its value is taken.
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
    """(tokens, [(context, seconds)]) of a full pass of one request."""
    level2_by_tokens: list[tuple[float, float]]
    """(tokens, seconds) of a pass of level 2 of one request, over a full budget."""
    level2_per_row: float
    """Seconds that another request adds to a pass of level 2."""
    draft: float = 0.0
    """Seconds of the draft's pass for one request."""
    draft_per_row: float = 0.0
    sampling: float = 0.0
    """Seconds that a row of logits takes to become a distribution (temperature, top-p)."""


# Weight of the newest step in the moving averages.
_NEW = 1 / 8
# Relative error of a prediction before any was compared with what happened: machines like the one
# in docs/results/2026-11-21-cpu.md vary as much from run to run.
_FIRST_ERROR = 0.15


@dataclass
class CostModel:
    """Seconds of every kind of work in a step.

    A full pass of requests with ``q`` tokens each at contexts ``c`` takes
    ``rows(sum q) + sum attention(q, c) + overhead``: the first two are measured at start-up, the
    last (scheduler, sampling, output; and whatever the measurement missed) while running, and so
    is what each draft token costs more.
    """

    measured: Measurements
    speed: float = 1.0
    """Factor on full passes: below 1 where the machine was slower while it was measured."""
    overheads: dict[int, float] = field(default_factory=dict)
    """Seconds of a step beside its full pass, by size of the batch in powers of two."""
    per_draft: dict[bool, float] = field(default_factory=dict)
    """Further seconds for each draft token that a step verifies (penalties, top-p, rejection
    sampling), by whether the batch is greedy."""
    per_test: dict[bool, float] = field(default_factory=dict)
    """Seconds of level 2's test of a token, by whether the batch is greedy."""
    factors: dict[str, float] = field(default_factory=dict)
    """Measured time over predicted time, of level 1's and level 2's passes."""
    error: float = _FIRST_ERROR
    """Of predictions of steps with drafts and of rounds, relative: what gains less than this is
    not worth trying."""
    begin_seconds: float = 0.0
    """Per request and proposal: selection, block tables."""
    rounds: dict[int, float] = field(default_factory=dict)
    """Seconds of a round of level 1, level 2 and the test between them, by requests in powers of 2
    (``int.bit_length``)."""
    stretches: dict[int, float] = field(default_factory=dict)
    """Seconds of all rounds of a proposal over what the requests' shares of them came to, by size
    of the batch: requests need unequal numbers of rounds, and the last ones are not shared."""

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        """Without overhead.

        Args:
            tokens: of each request.
            contexts: tokens of each request.
        """
        seconds = self.speed * interpolate(self.measured.full_by_rows, sum(tokens))
        return seconds + sum(self.attention(q, c) for q, c in zip(tokens, contexts))

    def attention(self, num_tokens: int, context: int) -> float:
        """What the context adds to a pass of one request."""
        return max(0.0, interpolate(self.attention_by_tokens(context), num_tokens))

    def attention_by_tokens(self, context: int) -> list[tuple[float, float]]:
        """(tokens, seconds) that a context adds to a pass of one request."""
        return [
            (q, self.speed * (interpolate(points, context) - points[0][1]))
            for q, points in self.measured.full_by_tokens
        ]

    def level2(self, num_rows: int, num_tokens: int) -> float:
        """A pass of level 2 of ``num_tokens`` a request."""
        seconds = interpolate(self.measured.level2_by_tokens, num_tokens)
        return self.factors.get("level 2", 1.0) * (
            seconds + (num_rows - 1) * self.measured.level2_per_row
        )

    def draft(self, num_rows: int) -> float:
        """A pass of the draft."""
        return self.factors.get("level 1", 1.0) * (
            self.measured.draft + (num_rows - 1) * self.measured.draft_per_row
        )

    def round_seconds(self, num_rows: int, has_draft: bool) -> float:
        """Of a round for so many requests."""
        size = num_rows.bit_length()
        expected = self.level2(num_rows, 3) + 2 * has_draft * self.draft(num_rows)
        if not self.rounds or size in self.rounds:
            return self.rounds.get(size, expected)
        near = min(self.rounds, key=lambda other: abs(other - size))
        expected_near = self.level2(1 << (near - 1), 3) + 2 * has_draft * self.draft(
            1 << (near - 1)
        )
        return expected * self.rounds[near] / expected_near

    def observe_round(self, num_rows: int, seconds: float) -> None:
        size = num_rows.bit_length()
        if size in self.rounds:
            self._compare(self.rounds[size], seconds)
        self.rounds[size] = self._moved(self.rounds.get(size), seconds, seconds)

    def stretch(self, num_rows: int) -> float:
        return self.stretches.get(num_rows.bit_length(), 1.0)

    def observe_proposal(self, num_rows: int, shares: float, seconds: float) -> None:
        """All rounds of a proposal took ``seconds``; ``shares`` were expected, without stretch."""
        size, new = num_rows.bit_length(), seconds / shares
        self.stretches[size] = self._moved(self.stretch(num_rows), new, 1.0)

    def overhead(self, num_rows: int) -> float:
        """Of a step, beside its full pass; of the nearest size of the batch that was seen."""
        if not self.overheads:
            return 0.0
        size = num_rows.bit_length()
        return self.overheads[min(self.overheads, key=lambda other: abs(other - size))]

    def observe_step(
        self,
        num_drafts: int,
        is_greedy: bool,
        tokens: Sequence[int],
        contexts: Sequence[int],
        seconds: float,
    ) -> None:
        """A step without its ``propose()``."""
        predicted = self.full_pass(tokens, contexts)
        if seconds < predicted:
            self.speed = self._moved(self.speed, self.speed * seconds / predicted, self.speed)
        if not num_drafts:
            size = len(tokens).bit_length()
            beside = max(0.0, seconds - predicted)
            self.overheads[size] = self._moved(self.overheads.get(size), beside, seconds)
            return
        more = max(0.0, seconds - predicted - self.overhead(len(tokens))) / num_drafts
        expected = predicted + self.overhead(len(tokens))
        self._compare(expected + num_drafts * self.draft_seconds(is_greedy), seconds)
        old = self.per_draft.get(is_greedy)
        self.per_draft[is_greedy] = self._moved(old, more, seconds / num_drafts)

    def draft_seconds(self, is_greedy: bool) -> float:
        """What verifying a draft token costs beyond its place in the full pass."""
        return self.per_draft.get(is_greedy, 0.0 if is_greedy else self.measured.sampling)

    def observe_test(self, num_tokens: int, is_greedy: bool, seconds: float) -> None:
        """Level 2 tested so many tokens."""
        old, new = self.per_test.get(is_greedy), seconds / num_tokens
        self.per_test[is_greedy] = self._moved(old, new, 4 * new)

    def test_seconds(self, num_tokens: int, is_greedy: bool) -> float:
        first = 0.0 if is_greedy else self.measured.sampling
        return num_tokens * self.per_test.get(is_greedy, first)

    def observe(self, part: str, predicted: float, seconds: float) -> None:
        """Passes of a part that took ``seconds``; ``predicted`` has its present factor in it."""
        old = self.factors.get(part, 1.0)
        if predicted > 0:
            self.factors[part] = self._moved(old, old * seconds / predicted, 2 * old)

    def observe_begin(self, num_rows: int, seconds: float) -> None:
        new = seconds / num_rows
        self.begin_seconds = self._moved(self.begin_seconds or None, new, 4 * new)

    def _compare(self, expected: float, seconds: float) -> None:
        relative = min(1.0, abs(seconds - expected) / max(seconds, expected))
        self.error += _NEW / 4 * (relative - self.error)

    @staticmethod
    def _moved(old: float | None, new: float, most: float) -> float:
        """A moving average; what jumps by more than ``most`` is a disturbance, and is cut."""
        if old is None:
            return new
        return old + _NEW * max(-most, min(most, new - old))
