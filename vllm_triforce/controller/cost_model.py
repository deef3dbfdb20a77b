"""What a pass costs: measured at start-up, corrected by what steps really take."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_triforce.controller.measurements import Measurements, StepTime, interpolate

# Weight of the newest step in the moving averages.
_NEW = 1 / 8
# Of what a step was expected to take.
_CREDIBLE = 2.0
# Relative error of a prediction before any was compared with what happened: machines like the one
# in docs/results/2026-11-21-cpu.md vary as much from run to run.
_FIRST_ERROR = 0.15
# However well steps are predicted: what is accepted is not, and a gain of so little may be a loss.
_LEAST_ERROR = 0.05


@dataclass
class CostModel:
    """Seconds of every kind of work in a step.

    A full pass of requests with ``q`` tokens each at contexts ``c`` takes
    ``rows(sum q) + sum attention(q, c) + overhead``: the first two are measured at start-up, the
    last (scheduler, sampling, output; and whatever the measurement missed) while running, and so
    is what each draft token costs more. Where requests fill a machine together that one leaves
    idle, what attention takes is corrected for that (``company()``).
    """

    measured: Measurements
    speed: float = 1.0
    """Factor on full passes: below 1 where the machine was slower while it was measured."""
    overheads: dict[tuple[int, bool], float] = field(default_factory=dict)
    """Seconds of a plain step beside its full pass, by size of the batch in powers of two and
    whether it is greedy."""
    reevaluations: dict[tuple[int, bool], float] = field(default_factory=dict)
    """Seconds that a step takes longer for deciding to go on plainly, by the same."""
    speculating: dict[tuple[int, bool], float] = field(default_factory=dict)
    """Seconds that a step takes longer for verifying drafts at all, however few: deciding,
    rejection sampling, and what predictions miss on average; by the same."""
    per_draft: dict[bool, float] = field(default_factory=dict)
    """Further seconds for each draft token (penalties, top-p), by whether the batch is greedy."""
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

    def copy(self) -> "CostModel":
        """One that does not change with this one; the measurements never do."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        copied = {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
        return dataclasses.replace(self, **copied)

    def full_pass(self, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        """Without overhead.

        Args:
            tokens: of each request.
            contexts: tokens of each request.
        """
        if len(tokens) == 1:
            return self.rows(tokens[0]) + self.attention(tokens[0], contexts[0])
        count = np.asarray(tokens)
        of_one = self._attention_of(np.ones_like(count), contexts, int(count.max()))
        company, company_of_further = self.company(len(count), int((count > 1).sum()))
        seconds = self.rows(int(count.sum())) + company * float(of_one.sum())
        if (count > 1).any():
            more = self._attention_of(count, contexts, int(count.max())) - of_one
            seconds += company_of_further * float(more.sum())
        return seconds

    def company(self, num_reqs: int, num_verifying: int) -> tuple[float, float]:
        """Factors on what contexts add to a pass of so many requests: on what they add to single
        tokens, and on what the further tokens of ``num_verifying`` requests add to that."""
        plain, further = self.measured.company
        return _interpolate_factor(plain, num_reqs), _interpolate_factor(further, num_verifying)

    def rows(self, num_tokens: int) -> float:
        """Of a full pass, without its attention."""
        return self.speed * interpolate(self.measured.full_by_rows, num_tokens)

    def attention(self, num_tokens: int, context: int) -> float:
        """What a context adds to a pass of a request alone: one number of ``attention_table()``,
        which takes three times as long."""
        known, table = self.measured.contexts, self.measured.attention(num_tokens)
        if len(known) == 1:
            return 0.0
        end = int(known[1:-1].searchsorted(context, side="right")) + 1
        points = [(known[i], table[i, num_tokens]) for i in (end - 1, end)]
        return self.speed * max(0.0, float(interpolate(points, context)))

    def attention_table(self, contexts: Sequence[int], max_tokens: int) -> np.ndarray:
        """[num_reqs, at least ``max_tokens`` + 1], what a context adds to a pass of a request
        alone."""
        return self._attention_of(slice(None), contexts, max_tokens)

    def _attention_of(self, tokens, contexts: Sequence[int], max_tokens: int) -> np.ndarray:
        """
        Args:
            tokens: columns of the table: one of each request, [num_reqs], or a slice.

        Returns:
            [num_reqs] or [num_reqs, num_columns].
        """
        known, table = self.measured.contexts, self.measured.attention(max_tokens)
        at = np.maximum(contexts, known[0])
        if len(known) == 1:
            return np.zeros_like(table[np.zeros(len(at), dtype=int), tokens])
        end = known[1:-1].searchsorted(at, side="right") + 1
        share = (at - known[end - 1]) / (known[end] - known[end - 1])
        found = table[end - 1, tokens]
        share = share.reshape(-1, *[1] * (found.ndim - 1))
        found = found + share * (table[end, tokens] - found)
        return self.speed * np.maximum(found, 0.0)

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

    def reading_window(self, num_tokens: int) -> float:
        """What the draft takes to read so many tokens before it can go on."""
        return self.factors.get("level 1", 1.0) * num_tokens * self.measured.draft_per_token

    def first_selection(self, num_tokens: int) -> float:
        """What level 2 takes to look through a context for the first time."""
        return num_tokens * self.measured.selection_per_token

    def round_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Of a round for so many requests."""
        size = num_rows.bit_length()
        expected = self.level2(num_rows, 3) + num_drafts * self.draft(num_rows)
        if not self.rounds or size in self.rounds:
            return self.rounds.get(size, expected)
        near = min(self.rounds, key=lambda other: abs(other - size))
        expected_near = self.level2(1 << (near - 1), 3) + num_drafts * self.draft(1 << (near - 1))
        return expected * self.rounds[near] / expected_near

    def observe_round(self, num_rows: int, seconds: float) -> None:
        size = num_rows.bit_length()
        self.rounds[size] = self._moved(self.rounds.get(size), seconds, seconds)

    def overhead(self, num_rows: int, is_greedy: bool = True) -> float:
        """Of a plain step, beside its full pass."""
        return _nearest(self.overheads, num_rows, is_greedy)

    def reevaluation_seconds(self, num_rows: int, is_greedy: bool) -> float:
        """What a step takes longer for deciding to go on plainly; 0 where that is not known."""
        return _nearest(self.reevaluations, num_rows, is_greedy)

    def speculating_seconds(self, num_rows: int, is_greedy: bool) -> float:
        """What a step takes longer for verifying drafts at all."""
        return _nearest(self.speculating, num_rows, is_greedy)

    def draft_seconds(self, is_greedy: bool) -> float:
        """What verifying a draft token costs beyond its place in the full pass."""
        return self.per_draft.get(is_greedy, 0.0 if is_greedy else self.measured.sampling)

    def observe_step(self, step: StepTime) -> None:
        """Learns from a step what is beside the passes.

        What speculating adds beyond its plan is taken for a line, ``a + b * num_drafts``, which
        follows each step's error by a normalised step of least mean squares; four drafts a request
        weigh as much as one's being there at all.
        """
        num_rows = len(step.tokens)
        key = num_rows.bit_length(), step.is_greedy
        predicted = self.full_pass(step.tokens, step.contexts)
        # Without any overhead known it is taken to be as long as the pass.
        plain = predicted + (self.overhead(num_rows, step.is_greedy) or predicted)
        if step.is_reevaluation:
            seconds = _credible(step.seconds, plain)
            more = max(0.0, seconds - predicted - self.overhead(num_rows, step.is_greedy))
            self.reevaluations[key] = self._moved(self.reevaluations.get(key), more, seconds)
            return
        if step.seconds < predicted:
            faster = self.speed * step.seconds / predicted
            self.speed = self._moved(self.speed, faster, self.speed)
        if not step.num_drafts:
            seconds = _credible(step.seconds, plain)
            beside = max(0.0, seconds - predicted)
            self.overheads[key] = self._moved(self.overheads.get(key), beside, seconds)
            return
        constant = self.speculating_seconds(num_rows, step.is_greedy)
        per_draft = self.draft_seconds(step.is_greedy)
        expected = (
            self.full_pass([1] * num_rows, step.contexts)
            + self.overhead(num_rows, step.is_greedy)
            + step.planned_seconds
            + constant
            + per_draft * step.num_drafts
        )
        seconds = _credible(step.seconds + step.proposal_seconds, expected)
        error = max(-seconds, min(seconds, seconds - expected))
        typical = 4 * num_rows
        drafts = step.num_drafts / typical
        part = _NEW * error / (1 + drafts**2)
        self.speculating[key] = max(0.0, constant + part)
        self.per_draft[step.is_greedy] = max(0.0, per_draft + part * drafts / typical)
        self._compare(expected, seconds)

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
        self.error = max(_LEAST_ERROR, self.error + _NEW / 4 * (relative - self.error))

    @staticmethod
    def _moved(old: float | None, new: float, most: float) -> float:
        """A moving average; what jumps by more than ``most`` is a disturbance, and is cut."""
        if old is None:
            return new
        return old + _NEW * max(-most, min(most, new - old))


def _credible(seconds: float, expected: float) -> float:
    """What a step is believed to have taken: between two of them the engine may have been paused,
    or the machine busy with something else. A machine that stays slower is believed by and by."""
    return min(seconds, _CREDIBLE * expected)


def _interpolate_factor(points: list[tuple[float, float]], count: int) -> float:
    """Between two points it is the sum that grows linearly. Beyond the last one the factor stays: a
    machine that is full by then takes as much longer as there are more requests."""
    if len(points) == 1 or count <= 1:
        return 1.0
    if count >= points[-1][0]:
        return points[-1][1]
    return interpolate([(x, x * factor) for x, factor in points], count) / count


def _nearest(seconds: dict[tuple[int, bool], float], num_rows: int, is_greedy: bool) -> float:
    """Of the nearest size of a batch of that kind that was seen, or else of the other kind."""
    if not seconds:
        return 0.0
    size = num_rows.bit_length()
    return seconds[min(seconds, key=lambda key: (key[1] != is_greedy, abs(key[0] - size)))]
