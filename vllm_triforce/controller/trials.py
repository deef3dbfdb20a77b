"""Trial proposals: a fixed share of the time for proposals that the plan does not make."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from vllm_triforce.controller.options import Candidate, Options
from vllm_triforce.controller.planner import StepCosts, unshared_seconds

# Share of the time for trials. Re-evaluations and baseline probes have the same share each.
TRIAL_SHARE = 0.005
# Steps of plain decoding that are saved for trials, at the start and at most.
MAX_STEPS = 4
# Requests that speculate try another route in every fourth decision.
_OTHER_ROUTES_EVERY = 4
# Tokens of a trial: about one round of levels 1 and 2.
_TRIAL_LENGTH = 3


class Trials:
    """Proposals of requests that decode plainly, or by another route than planned."""

    def __init__(self) -> None:
        # Seconds that may be spent, and that may be saved.
        self._balance_s, self._max_s = math.inf, 0.0
        self._num_decisions = 0
        self._waiting_since: dict[str, int] = {}
        """Decision in which a request came, or had its last trial."""
        self._pending: dict[str, tuple[float, int, float]] = {}
        """Each request's last trial without an outcome: seconds that were spent, and the requests
        and the plain seconds of its step."""

    def earn(self, seconds: float, plain_s: float) -> None:
        """Save the share of ``seconds`` of decoding, up to a few plain steps."""
        self._max_s = MAX_STEPS * plain_s
        self._save(TRIAL_SHARE * seconds)

    def _save(self, seconds: float) -> None:
        self._balance_s = min(self._balance_s + seconds, self._max_s)

    def begin_decision(self, candidates: Sequence[Candidate]) -> None:
        self._num_decisions += 1
        for candidate in candidates:
            self._waiting_since.setdefault(candidate.request_id, self._num_decisions)

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
        is_trial = self._possible_trials(columns, options)
        fixed_s = 0.0
        if (columns < 0).all():
            # The first trial pays for the decision after it, and for verifying any drafts.
            fixed_s = costs.speculating_s + costs.model.decision_s
        if not is_trial.any() or _cheapest(options, is_trial) + fixed_s > self._balance_s:
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
            if cost_s > self._max_s:
                continue
            if cost_s > self._balance_s:
                break  # save for the request whose turn it is
            self._balance_s -= cost_s
            columns[row], fixed_s, num_trials = trial, 0.0, num_trials + 1
            request_id = candidates[row].request_id
            self._waiting_since[request_id] = self._num_decisions
            self._pending[request_id] = cost_s, num_reqs, costs.plain_s
        return num_trials > 0

    def _possible_trials(
        self, columns: np.ndarray, options: Options
    ) -> np.ndarray:  # [num_reqs, num_columns], bool
        """Mark the options by other routes than a request's own."""
        names = [None, *dict.fromkeys(options.routes)]
        routes = np.array([names.index(route) for route in options.routes])
        planned = np.where(columns >= 0, routes[columns], 0)
        is_trial = options.is_possible & (routes != planned[:, None])
        if self._num_decisions % _OTHER_ROUTES_EVERY:
            is_trial[columns >= 0] = False
        return is_trial

    def on_verified(self, request_id: str, num_accepted: int) -> None:
        """Refund the seconds that a trial's accepted tokens save, by the rule of ``plan()``."""
        if request_id in self._pending:
            cost_s, num_reqs, plain_s = self._pending.pop(request_id)
            self._save(min(cost_s, ((1 + num_accepted) ** (1 / num_reqs) - 1) * plain_s))

    @property
    def num_requests(self) -> int:
        return len(self._waiting_since)

    def release(self, request_id: str) -> None:
        self._waiting_since.pop(request_id, None)
        self._pending.pop(request_id, None)


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
