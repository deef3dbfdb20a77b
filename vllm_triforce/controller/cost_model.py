"""Cost of passes and steps: measured at start-up, corrected by the steps that follow."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_triforce.controller.measurements import Measurements, StepTime, interpolate

# Weight of the newest value in moving averages, and in the baseline's where it is faster.
_NEW = 1 / 8
_FASTER = 1 / 2
_FORGOTTEN = 1 / 1024  # in a plain step
# A step is believed to have taken at most twice the expected time: engines pause.
_CREDIBLE = 2.0
# Factor on a decision's own seconds: an allowance for other work that it slows down.
_DECISION_DELAY = 2.0
# Relative error of predictions, before any was compared with a step; and at least, since
# acceptance is predicted worse than time.
_FIRST_ERROR, _MIN_ERROR = 0.15, 0.05
# Steps that the first error is worth, and steps after which one counts 1/e.
_FIRST_WEIGHT, _ERROR_MEMORY = 4, 32

BatchKey = tuple[int, bool]
"""Size of a batch in powers of 2 (``int.bit_length``), and True if it is greedy."""


@dataclass
class CostModel:
    """Seconds of every kind of work in a step.

    A full pass of requests with ``q`` tokens each at contexts ``c`` takes
    ``rows(sum q) + sum attention(q, c) + overhead``. Rows and attention are measured at start-up.
    The overhead (scheduler, sampling, output, errors of the measurement) is learned from plain
    steps, and further seconds of drafts from steps that verify some.
    """

    measured: Measurements
    drafts_per_round: int = 0
    """Passes of the draft model in a planned round."""
    speed: float = 1.0
    """Factor on full passes, below 1 where the machine was slower at start-up."""
    overheads: dict[BatchKey, float] = field(default_factory=dict)
    """Seconds of a plain step beside its full pass, negative where that was measured too slow."""
    decision_s: float = 0.0
    """Seconds by which a decision delays a step."""
    speculating: dict[BatchKey, float] = field(default_factory=dict)
    """Seconds that verifying any drafts adds to a step: rejection sampling, decisions, and the
    mean error of predictions."""
    level1_factor: float = 1.0
    """Measured over predicted seconds of the draft model's passes."""
    level2_factors: dict[int, float] = field(default_factory=dict)
    """Measured over predicted seconds of level 2's pass and test, by requests in powers of 2."""
    balance_s: float | None = None
    """Seconds that speculation may lose (``exploration.py``); None before the first proposal."""
    error: float = _FIRST_ERROR
    """Mean relative excess of steps over their prediction; a smaller gain is not worth trying."""
    num_errors: int = 0
    """Steps in ``error``."""

    def copy(self) -> "CostModel":
        """Copy everything learned; the measurements never change."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        dicts: dict[str, Any] = {n: dict(v) for n, v in values.items() if isinstance(v, dict)}
        return dataclasses.replace(self, **dicts)

    def forget_a_little(self, num_steps: int) -> None:
        """Move the learned costs of proposals towards the start-up's measurements.

        Steps without proposals cannot correct these costs. Without this, one slow moment would
        forbid proposals for good.
        """
        keep = (1 - _FORGOTTEN) ** num_steps
        self.speculating = {key: keep * s for key, s in self.speculating.items()}
        self.level1_factor = 1 + keep * (self.level1_factor - 1)
        self.level2_factors = {n: 1 + keep * (f - 1) for n, f in self.level2_factors.items()}
        self.error = min(self.error, _FIRST_ERROR + keep * (self.error - _FIRST_ERROR))

    # Full passes.

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        """Return the seconds of a full pass, without overhead, of each request's tokens."""
        counts = np.asarray(tokens)
        table = self.attention_table(contexts, int(counts.max()))
        first = table[:, 1]
        further = table[np.arange(len(counts)), counts] - first
        scale, further_scale = self.attention_scales(len(counts), int((counts > 1).sum()))
        attention_s = scale * first.sum() + further_scale * further.sum()
        return self.rows(int(counts.sum())) + float(attention_s)

    def rows(self, num_tokens: int) -> float:
        """Return the seconds of a full pass without its attention."""
        return self.speed * interpolate(self.measured.full_by_rows, num_tokens)

    def attention_table(self, contexts: Sequence[int], max_tokens: int) -> np.ndarray:
        """Return the seconds that contexts add to passes of one request.

        Returns:
            [num_reqs, at least ``max_tokens`` + 1], by tokens in the pass.
        """
        points, table = self.measured.contexts, self.measured.attention(max_tokens)
        at = np.maximum(contexts, points[0])
        if len(points) == 1:
            return np.zeros((len(at), table.shape[1]))
        end = points[1:-1].searchsorted(at, side="right") + 1
        share = ((at - points[end - 1]) / (points[end] - points[end - 1]))[:, None]
        seconds = table[end - 1] + share * (table[end] - table[end - 1])
        return self.speed * np.maximum(seconds, 0.0)

    def attention_scales(self, num_reqs: int, num_verifying: int) -> tuple[float, float]:
        """Return factors on the sum of the requests' attention alone.

        They are for single tokens of ``num_reqs`` requests, and for further tokens of
        ``num_verifying`` ones. Requests fill a machine together that one leaves idle.
        """
        first, further = self.measured.attention_scales
        return _interpolate_scale(first, num_reqs), _interpolate_scale(further, num_verifying)

    # Proposals.

    def level2(self, num_rows: int, num_tokens: int, context: float = 0) -> float:
        """Return the seconds of level 2's pass of ``num_tokens`` a request, and of their test.

        ``context`` is the mean of the requests' tokens, here and below.
        """
        return self._level2_factor(num_rows) * self.measured.level2(num_rows, num_tokens, context)

    def _level2_factor(self, num_rows: int) -> float:
        """Return the learned factor of the nearest size."""
        size, learned = num_rows.bit_length(), self.level2_factors
        return learned[min(learned, key=lambda n: abs(n - size))] if learned else 1.0

    def draft(self, num_rows: int) -> float:
        """Return the seconds of a pass of the draft model."""
        seconds = self.measured.draft + (num_rows - 1) * self.measured.draft_per_row
        return self.level1_factor * seconds

    def round_seconds(self, num_rows: int, context: float = 0) -> float:
        """Return the seconds of a round of levels 1 and 2."""
        return self.level2(num_rows, 3, context) + self.drafts_per_round * self.draft(num_rows)

    def verification(
        self,
        contexts: Sequence[int],
        is_greedy: Sequence[bool],
        num_reqs: int,
        max_tokens: int,
    ) -> np.ndarray:
        """Return the seconds that verifying 0, 1 ... ``max_tokens`` of one request adds to a step.

        It is the request's share where all ``num_reqs`` of the step verify as many.

        Args:
            contexts, is_greedy: of each request that drafts.

        Returns:
            [len(contexts), max_tokens + 1]
        """
        attention = self.attention_table(contexts, max_tokens + 1)
        # With a proposal of n tokens the pass has n + 1 of the request; a plain step has the first.
        further_s = attention[:, 1 : max_tokens + 2] - attention[:, 1:2]
        rows_s = np.array([self.rows(num_reqs * (n + 1)) for n in range(max_tokens + 1)])
        scale = self.attention_scales(num_reqs, len(contexts))[1]
        test_s = self.measured.test_per_token * np.outer(
            ~np.array(is_greedy), range(max_tokens + 1)
        )
        return (rows_s - rows_s[0]) / num_reqs + scale * further_s + test_s

    # Steps, beside their passes.

    def overhead(self, num_rows: int, is_greedy: bool = True) -> float:
        """Return the seconds of a plain step beside its full pass."""
        return _nearest(self.overheads, num_rows, is_greedy)

    def plain_step(self, contexts: Sequence[int], num_reqs: int, is_greedy: bool) -> float:
        """Return the seconds of a plain step, with the attention of ``contexts`` alone."""
        pass_s = self.full_pass([1] * len(contexts), contexts)
        return max(pass_s / 2, pass_s + self.overhead(num_reqs, is_greedy))

    def speculating_seconds(self, num_rows: int, is_greedy: bool) -> float:
        """Return the seconds that verifying any drafts adds to a step."""
        return _nearest(self.speculating, num_rows, is_greedy)

    # Learning.

    def observe_level1(self, predicted: float, seconds: float) -> None:
        """Learn from passes of the draft model; ``predicted`` with the present factor."""
        if predicted > 0:
            old = self.level1_factor
            self.level1_factor = _moved(old, old * seconds / predicted, 2 * old)

    def observe_level2(
        self, num_rows: int, num_tokens: float, context: float, seconds: float
    ) -> None:
        """Learn from level 2's pass and test; arguments as of ``level2()``."""
        predicted = self.measured.level2(num_rows, num_tokens, context)
        if predicted > 0:
            old = self._level2_factor(num_rows)
            self.level2_factors[num_rows.bit_length()] = _moved(old, seconds / predicted, 2 * old)

    def observe_decision(self, seconds: float) -> None:
        """Learn from a decision. Disturbances, as its first calls, make it slower, never faster."""
        old, new = self.decision_s or None, _DECISION_DELAY * seconds
        self.decision_s = _moved(old, new, 2 * (old or new), _FASTER)

    def observe_step(self, step: StepTime) -> tuple[float, float]:
        """Learn the seconds of a step beside its passes.

        Returns:
            Seconds of the step with its proposal, cut where they are not credible, and of a plain
            step in its place.
        """
        num_rows = len(step.tokens)
        key = num_rows.bit_length(), step.is_greedy
        passes_s = self.full_pass(step.tokens, step.contexts)
        overhead_s = self.overhead(num_rows, step.is_greedy)
        # Before any overhead is known it is taken to be as long as the pass.
        plain_s = passes_s + (overhead_s or passes_s)
        # Nothing but a slower start-up makes steps faster than their measured passes.
        faster = min(1.0, self.speed * step.seconds / passes_s)
        self.speed = _moved(self.speed, faster, self.speed)
        if not step.num_drafts:
            seconds = min(step.seconds, _CREDIBLE * plain_s)
            # Negative where the start-up measured this pass too slow and not those of proposals,
            # which hold ``speed``.
            beside_s = max(-passes_s / 2, seconds - passes_s)
            old_s = self.overheads.get(key)
            # Too long a baseline costs most: it makes everything pay, and then hardly any step is
            # plain. Disturbances make steps slower, never faster.
            self.overheads[key] = _moved(old_s, beside_s, seconds, _FASTER)
            return seconds, seconds
        speculating_s = self.speculating_seconds(num_rows, step.is_greedy)
        plain_s = self.plain_step(step.contexts, num_rows, step.is_greedy)
        expected = plain_s + step.planned_seconds + speculating_s
        seconds = min(step.seconds + step.proposal_seconds, _CREDIBLE * expected)
        error = max(-seconds, seconds - expected)
        self.speculating[key] = max(0.0, speculating_s + _NEW * error)
        # Signed, so that noise without a bias makes no plan worse.
        relative = (seconds - expected) / max(seconds, expected)
        self.num_errors = min(self.num_errors + 1, _ERROR_MEMORY - _FIRST_WEIGHT)
        error = self.error + (relative - self.error) / (_FIRST_WEIGHT + self.num_errors)
        self.error = max(_MIN_ERROR, error)
        return seconds, plain_s


def _moved(old: float | None, new: float, max_change: float, faster: float = _NEW) -> float:
    """Move an average towards ``new``; a larger change is a disturbance, and is cut.

    Args:
        faster: weight of ``new`` where it is below the average.
    """
    if old is None:
        return new
    weight = faster if new < old else _NEW
    return old + weight * max(-max_change, min(max_change, new - old))


def _interpolate_scale(points: list[tuple[float, float]], count: int) -> float:
    """Interpolate the batch's seconds; beyond the last point the factor stays."""
    if len(points) == 1 or count <= 1:
        return 1.0
    if count >= points[-1][0]:
        return points[-1][1]
    return interpolate([(x, x * factor) for x, factor in points], count) / count


def _nearest(seconds: dict[BatchKey, float], num_rows: int, is_greedy: bool) -> float:
    """Return the value of the nearest size of that kind, else of the other kind, else 0."""
    if not seconds:
        return 0.0
    size = num_rows.bit_length()
    return seconds[min(seconds, key=lambda key: (key[1] != is_greedy, abs(key[0] - size)))]
