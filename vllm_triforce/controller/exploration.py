"""Finding out what present choices do not show, within ``exploration_budget.py``'s time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from vllm_triforce.controller.exploration_budget import ExplorationBudget
from vllm_triforce.controller.options import Candidate, Options
from vllm_triforce.controller.planner import Plan, best_alone
from vllm_triforce.controller.routes import LEVELS, Route

# Steps with drafts after which a plain one says again what is compared with.
_PROBE_AGAIN = 16
# Steps of a baseline probe: this one and those of a short rest.
_PROBE_STEPS = 3
# Steps of plain decoding that promising trials may take beyond what they are worth, at once.
_INVESTED = 8
# Steps of plain decoding that are saved up for trials at most.
_SAVED = 4
# Of so many decisions one looks whether requests that speculate should try another route.
_OTHER_ROUTES_EVERY = 4
# Tokens of a trial: what a round of level 1 and level 2 adds, about.
_TRIAL_LENGTH = 3


@dataclass
class _Trial:
    """What a request tries in this step.

    Args:
        charged: seconds of the budget.
        needed: tokens that have to be accepted for such proposals to pay.
        num_reqs, plain_seconds: of the batch's step.
    """

    charged: float
    needed: float
    num_reqs: int
    plain_seconds: float

    def worth(self, num_accepted: int) -> float:
        """Seconds that the batch loses by the trial at most without being slower for it, as
        ``planner.plan()`` counts: one request's tokens have to make up for everybody's waiting."""
        return self.plain_seconds * ((1 + num_accepted) ** (1 / self.num_reqs) - 1)


class Exploration:
    """Trials of requests that decode plainly, and plain steps of batches that speculate."""

    def __init__(self) -> None:
        self.trials = ExplorationBudget(first=2, most=_SAVED)
        self._promising = ExplorationBudget(first=_INVESTED, most=_INVESTED)
        """As much time again, for trials after one that was as good as it had to be."""
        self.baseline_probes = ExplorationBudget(first=0, most=_PROBE_STEPS)
        self._last_plain = 0
        self._turn = 0
        self._waits_since: dict[str, int] = {}
        """Each request's turn at which it came, or had its last trial in vain."""
        self._trying: dict[str, _Trial] = {}
        self._in_flight: set[str] = set()
        """Those whose trial is still to be told of."""

    def probes_baseline_now(
        self, step: int, best: Plan, plain_seconds: float, has_seed: bool
    ) -> bool:
        """Whether the next steps decode plainly to see what that takes by now: it is what
        speculation is compared with, and unseen it could be overrated for long."""
        self.baseline_probes.earn(best.seconds, plain_seconds)
        if best.is_plain:
            self._last_plain = step
            return False
        if step - self._last_plain < _PROBE_AGAIN or has_seed:
            return False
        if not self.baseline_probes.spend(_PROBE_STEPS * plain_seconds * (1 - 1 / best.speedup)):
            return False
        self._last_plain = step
        return True

    def earn(self, seconds: float, plain_seconds: float) -> None:
        """For trials, by decoding for so long with steps that are plain in ``plain_seconds``."""
        self.trials.earn(seconds, plain_seconds)
        self._promising.earn(seconds, plain_seconds)

    def begin_turn(self, candidates: Sequence[Candidate]) -> None:
        """There is a decision."""
        self._turn += 1
        for candidate in candidates:
            name = candidate.request_id
            self._waits_since.setdefault(name, self._turn)
            if name not in self._in_flight:
                self.lost(name)

    def await_outcomes(self, request_ids: Iterable[str]) -> None:
        """It will be known later what came of their proposals, if they were trials."""
        self._in_flight.update(name for name in request_ids if name in self._trying)

    def lost(self, request_id: str) -> None:
        """If its proposal was a trial, nothing of it was verified."""
        self._in_flight.discard(request_id)
        if self._trying.pop(request_id, None):
            self._waits_since[request_id] = self._turn

    def add_trials(
        self,
        columns: np.ndarray,  # [num_reqs], of ``found``; -1 becomes a trial's
        candidates: Sequence[Candidate],
        found: Options,
        alone: Callable[[], Options],
        optimistic: Callable[[], Options],
        plain_seconds: float,
        num_plain: int,
        margin: float,
        remaining_setup_s: float = 0.0,
    ) -> None:
        """Lets requests speculate that would not, or by a route that promises more than theirs
        but is thought little of, as far as the budget goes: those first that have waited longest
        for it, or one that gains nothing would keep the others from their turn. One whose trial
        paid for itself does not wait anew.

        Args:
            alone: gives the same options with the times of a request that shares its rounds with
                nobody, as it is with most trials.
            optimistic: gives the same options if as much is accepted as may be hoped for.
            num_plain: further requests of the batch.
            remaining_setup_s: what it takes besides that anybody speculates at all; the first trial
                bears it where nobody does.
        """
        more = 0.0 if (columns >= 0).any() else remaining_setup_s
        could = _beyond_present(found, columns)
        could[[candidate.request_id in self._in_flight for candidate in candidates]] = False
        if self._turn % _OTHER_ROUTES_EVERY:
            could[columns >= 0] = False
        if not could.any() or not self.trials.covers(_cheapest(found, could) + more):
            return
        num_reqs = len(columns) + num_plain
        share, hoped, alone = plain_seconds / num_reqs, optimistic(), cache(alone)
        best, rates = best_alone(replace(hoped, is_possible=could), share)
        taken = np.flatnonzero(columns >= 0)
        step_seconds = plain_seconds + found.seconds[taken, columns[taken]].sum()
        names = [candidate.request_id for candidate in candidates]

        def turn(row: int) -> tuple[bool, int]:
            return columns[row] >= 0, self._waits_since[names[row]]

        is_saving = False
        for row in sorted(np.flatnonzero(could.any(axis=1)), key=turn):
            now, route = columns[row], hoped.routes[best[row]]
            is_plain = now < 0
            if is_saving and not is_plain:
                break  # for those that do not speculate
            instead = 0.0 if is_plain else float(found.tokens[row, now])
            present = (1 + instead) / (share + (0 if is_plain else found.seconds[row, now]))
            if rates[row] <= (1 + margin) * present:
                continue  # nothing to be gained whatever is accepted
            trial = _short(found, row, route)
            seconds = alone().next_seconds(row, trial) + more
            if not is_plain:  # what it would have gained by what it does not do now
                given_up = step_seconds / num_reqs * np.log1p(instead) - found.seconds[row, now]
                seconds += max(0.0, float(given_up))
            if not self.trials.spend(seconds):
                is_saving |= is_plain and seconds <= _SAVED * plain_seconds
                continue
            if not any(found.routes[column] == LEVELS for column in columns if column >= 0):
                found.seconds[row, trial] = alone().seconds[row, trial]
                found.shared_seconds[row, trial] = alone().shared_seconds[row, trial]
            columns[row] = trial
            more = 0.0
            self._trying[names[row]] = _Trial(
                seconds,
                float(present * (share + found.seconds[row, trial]) - 1),
                num_reqs,
                plain_seconds,
            )

    def came_of_it(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Level 3 tested a proposal. If it was a trial, the budget gets back what that was
        worth; and all of it, as far as there is time for that, where as much was accepted as has
        to be: what one request's trial costs the batch is little to what all may gain by it."""
        self._in_flight.discard(request_id)
        trial = self._trying.pop(request_id, None)
        if trial is None:
            return
        is_promising = num_accepted >= min(trial.needed, num_drafted)
        worth = min(trial.charged, trial.worth(num_accepted))
        if is_promising and self._promising.spend(trial.charged - worth):
            worth = trial.charged
        self.trials.give_back(worth)
        if worth < trial.charged:
            self._waits_since[request_id] = self._turn

    @property
    def num_requests(self) -> int:
        return max(len(self._waits_since), len(self._trying))

    def release(self, request_id: str) -> None:
        self._waits_since.pop(request_id, None)
        self._trying.pop(request_id, None)
        self._in_flight.discard(request_id)


def _beyond_present(found: Options, columns: np.ndarray) -> np.ndarray:
    """What requests could try, [num_reqs, num_options]: routes that they do not take now."""
    routes = [None, *dict.fromkeys(found.routes)]
    of_option = np.array([routes.index(route) for route in found.routes])
    now = np.where(columns >= 0, of_option[columns], 0)
    return found.is_possible & (of_option != now[:, None])


def _cheapest(found: Options, could: np.ndarray) -> float:
    """Seconds below which no request has one of these trials."""
    is_trial = could
    if (is_trial & (found.lengths >= _TRIAL_LENGTH)).any():
        is_trial = is_trial & (found.lengths >= _TRIAL_LENGTH)
    return float(found.seconds[is_trial].min())


def _short(found: Options, row: int, route: Route) -> int:
    """The column of a short proposal by a route."""
    wanted = np.array([r == route for r in found.routes]) & found.is_possible[row]
    if not wanted.any():
        wanted = found.is_possible[row]
    distance = np.where(wanted, np.abs(found.lengths[row] - _TRIAL_LENGTH), np.inf)
    return int(distance.argmin())
