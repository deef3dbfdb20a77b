"""Trial proposals: a fixed share of the time for proposals that the plan does not make."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_triforce.controller.options import Candidate, Options
from vllm_triforce.controller.planner import StepCosts, unshared_seconds

# Share of the time for trials. Re-evaluations and baseline probes have the same share each.
TRIAL_SHARE = 0.005
# Steps of plain decoding that are saved for trials: at the start, and at most.
_FIRST_STEPS, _MAX_STEPS = 2, 4
# Requests that speculate try another route in every fourth decision.
_OTHER_ROUTES_EVERY = 4
# Tokens of a trial: about one round of levels 1 and 2.
_TRIAL_LENGTH = 3


class TrialBudget:
    """Seconds for trials: a fixed share of the time, saved up to a few plain steps."""

    def __init__(self, first_steps: float = _FIRST_STEPS, max_steps: float = _MAX_STEPS) -> None:
        self._first_steps, self._max_steps = first_steps, max_steps
        self._balance_s: float | None = None
        self._max_s = 0.0

    def earn(self, seconds: float, plain_s: float) -> None:
        """Add the share of ``seconds`` of decoding."""
        self._max_s = self._max_steps * plain_s
        if self._balance_s is None:
            self._balance_s = self._first_steps * plain_s
        self._balance_s = min(self._balance_s + TRIAL_SHARE * seconds, self._max_s)

    def covers(self, seconds: float) -> bool:
        """True if ``seconds`` are left."""
        return self._balance_s is not None and seconds <= self._balance_s

    def can_save(self, seconds: float) -> bool:
        return seconds <= self._max_s

    def spend(self, seconds: float) -> bool:
        """Spend ``seconds`` if they are left."""
        if self._balance_s is None or seconds > self._balance_s:
            return False
        self._balance_s -= seconds
        return True

    def refund(self, seconds: float) -> None:
        self._balance_s = min((self._balance_s or 0.0) + seconds, self._max_s)


class _Trial(NamedTuple):
    """A request's trial whose outcome is not known yet."""

    cost_s: float  # charged to the budget
    min_accepted: float  # tokens from which on such a proposal pays
    num_reqs: int  # of the step
    plain_s: float

    def refund_s(self, num_accepted: int) -> float:
        """Return the batch's seconds that the accepted tokens save, by the rule of ``plan()``."""
        gain = (1 + num_accepted) ** (1 / self.num_reqs) - 1
        return min(self.cost_s, gain * self.plain_s)


class Trials:
    """Proposals of requests that decode plainly, or by another route than planned."""

    def __init__(self) -> None:
        self.budget = TrialBudget()
        self._num_decisions = 0
        self._waiting_since: dict[str, int] = {}
        """Decision in which a request came, or had its last trial that did not pay."""
        self._pending: dict[str, _Trial] = {}
        self._in_flight: set[str] = set()
        """Requests whose trial's outcome comes after further decisions."""

    def begin_decision(self, candidates: Sequence[Candidate]) -> None:
        """Count a decision, and discard trials without a verified token."""
        self._num_decisions += 1
        for candidate in candidates:
            self._waiting_since.setdefault(candidate.request_id, self._num_decisions)
            if candidate.request_id not in self._in_flight:
                self.discard(candidate.request_id)

    def await_outcomes(self, request_ids: Iterable[str]) -> None:
        """Keep the trials of these requests over further decisions."""
        self._in_flight.update(
            request_id for request_id in request_ids if request_id in self._pending
        )

    def discard(self, request_id: str) -> None:
        self._in_flight.discard(request_id)
        if self._pending.pop(request_id, None):
            self._waiting_since[request_id] = self._num_decisions

    def add(
        self,
        columns: np.ndarray,  # [num_reqs] int, of ``options``; a trial's column replaces it
        candidates: Sequence[Candidate],
        options: Options,
        optimistic: Callable[[], Options],
        costs: StepCosts,
    ) -> bool:
        """Start trials while the budget lasts, longest-waiting request first.

        Args:
            optimistic: builds the options with prior acceptance.

        Returns:
            True if a trial was started.
        """
        is_trial = self._possible_trials(columns, candidates, options)
        fixed_s = 0.0
        if (columns < 0).all():
            # The first trial pays for the decision after it, and for verifying any drafts.
            fixed_s = costs.speculating_s + costs.model.decision_s
        if not is_trial.any() or not self.budget.covers(_cheapest(options, is_trial) + fixed_s):
            return False
        num_reqs = len(columns) + costs.num_plain
        share_s = costs.plain_s / num_reqs
        speeds = (1 + optimistic().tokens) / (share_s + options.seconds)
        speeds = np.where(is_trial, speeds, -np.inf)
        planned = np.flatnonzero(columns >= 0)
        step_s = costs.plain_s + options.seconds[planned, columns[planned]].sum()

        def turn(row: int) -> tuple[bool, int]:  # requests that decode plainly come first
            return columns[row] >= 0, self._waiting_since[candidates[row].request_id]

        num_trials = 0
        for row in sorted(np.flatnonzero(is_trial.any(axis=1)), key=turn):
            present_speed, lost_s = _present(options, row, columns[row], share_s, step_s / num_reqs)
            threshold = (1 + costs.model.error) * present_speed
            if speeds[row].max() <= threshold:
                continue  # no trial would pay
            trial = _short_proposal(options, row, options.routes[speeds[row].argmax()])
            trial_s = share_s + options.seconds[row, trial]
            if 1 + options.tokens[row, trial] > threshold * trial_s:
                continue  # it would pay, but others would lose: a trial finds out nothing
            cost_s = _seconds_alone(options, row, trial, costs) + lost_s + fixed_s
            if not self.budget.can_save(cost_s):
                continue
            if not self.budget.spend(cost_s):
                break  # save for the request whose turn it is
            columns[row], fixed_s, num_trials = trial, 0.0, num_trials + 1
            self._pending[candidates[row].request_id] = _Trial(
                cost_s, float(present_speed * trial_s) - 1, num_reqs, costs.plain_s
            )
        return num_trials > 0

    def _possible_trials(
        self, columns: np.ndarray, candidates: Sequence[Candidate], options: Options
    ) -> np.ndarray:  # [num_reqs, num_columns], bool
        """Mark the options by other routes than a request's own."""
        names = [None, *dict.fromkeys(options.routes)]
        routes = np.array([names.index(route) for route in options.routes])
        planned = np.where(columns >= 0, routes[columns], 0)
        is_trial = options.is_possible & (routes != planned[:, None])
        is_trial[[c.request_id in self._in_flight for c in candidates]] = False
        if self._num_decisions % _OTHER_ROUTES_EVERY:
            is_trial[columns >= 0] = False
        return is_trial

    def on_verified(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Refund the worth of a trial's tokens; a request whose trial did not pay waits again."""
        self._in_flight.discard(request_id)
        trial = self._pending.pop(request_id, None)
        if trial is None:
            return
        self.budget.refund(trial.refund_s(num_accepted))
        if num_accepted < min(trial.min_accepted, num_drafted):
            self._waiting_since[request_id] = self._num_decisions

    @property
    def num_requests(self) -> int:
        return max(len(self._waiting_since), len(self._pending))

    def release(self, request_id: str) -> None:
        self._waiting_since.pop(request_id, None)
        self._pending.pop(request_id, None)
        self._in_flight.discard(request_id)


def _present(
    options: Options, row: int, column: int, share_s: float, step_share_s: float
) -> tuple[float, float]:
    """Return a request's planned tokens a second, and the seconds that it loses without its plan.

    Args:
        column: planned option, -1 for none.
        share_s, step_share_s: the request's share of a plain step, and of the planned one.
    """
    if column < 0:
        return 1 / share_s, 0.0
    tokens, seconds = options.tokens[row, column], options.seconds[row, column]
    # A trial in its place costs the tokens that it would have gained, and saves its seconds.
    return (1 + tokens) / (share_s + seconds), max(0.0, step_share_s * np.log1p(tokens) - seconds)


def _seconds_alone(options: Options, row: int, column: int, costs: StepCosts) -> float:
    """Return the seconds of a request's first proposal whose passes no other request shares."""
    alone = np.full(len(options.tokens), -1)
    alone[row] = column
    return float(options.seconds[row, column]) + float(unshared_seconds(options, alone, costs))


def _cheapest(options: Options, is_trial: np.ndarray) -> float:
    """Bound the seconds of every trial from below."""
    is_long = is_trial & (options.lengths >= _TRIAL_LENGTH)
    return float(options.seconds[is_long if is_long.any() else is_trial].min())


def _short_proposal(options: Options, row: int, route: str) -> int:
    """Return the column of a short proposal by a route."""
    is_route = np.array([name == route for name in options.routes]) & options.is_possible[row]
    distances = np.where(is_route, np.abs(options.lengths[row] - _TRIAL_LENGTH), np.inf)
    return int(distances.argmin())
