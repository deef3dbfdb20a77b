"""Finding out what present choices do not show, within a share of the time (``allowance.py``)."""

import numpy as np

from vllm_triforce.controller.allowance import Allowance
from vllm_triforce.controller.choice import Route
from vllm_triforce.controller.options import Options
from vllm_triforce.controller.planner import Plan, best_alone

# Steps with drafts after which a plain one says again what is compared with.
_AUDIT_AGAIN = 16
# Tokens of a trial: what a round of level 1 and level 2 adds, about.
_TRIAL_LENGTH = 3


class Exploration:
    """Trials of requests that decode plainly, and plain steps of batches that speculate."""

    def __init__(self) -> None:
        self.trials = Allowance(first=1, most=4)
        self.audits = Allowance(first=0, most=1)
        self._last_plain = 0

    def audits_now(self, step: int, best: Plan, plain_seconds: float, has_seed: bool) -> bool:
        """Whether this step decodes plainly to see what that takes by now: it is what speculation
        is compared with, and unseen it could be overrated for long."""
        self.audits.earn(1, plain_seconds)
        if best.is_plain:
            self._last_plain = step
            return False
        if step - self._last_plain < _AUDIT_AGAIN or has_seed:
            return False
        if not self.audits.spend(plain_seconds * (1 - 1 / best.speedup)):
            return False
        self._last_plain = step
        return True

    def add_trials(
        self,
        columns: np.ndarray,  # [num_reqs], of ``found``; -1 becomes a trial's
        found: Options,
        hopeful: Options,
        plain_seconds: float,
        margin: float,
    ) -> int | None:
        """Lets requests speculate that would not, as far as the allowance goes.

        Args:
            hopeful: the same options if as much is accepted as may be hoped for.

        Returns:
            Steps until there is time for the next trial; None where none is waiting.
        """
        share = plain_seconds / len(columns)
        best, rates = best_alone(hopeful, share)
        waiting = []
        for row in np.flatnonzero((columns < 0) & found.is_possible.any(axis=1)):
            if rates[row] <= (1 + margin) / share:
                continue  # nothing to be gained whatever is accepted
            trial = _short(found, row, hopeful.routes[best[row]])
            seconds = float(found.seconds[row, trial])
            if self.trials.spend(seconds):
                columns[row] = trial
            else:
                waiting.append(1 + self.trials.steps_until(seconds, plain_seconds))
        return min(waiting, default=None)


def _short(found: Options, row: int, route: Route) -> int:
    """The column of a short proposal by a route."""
    wanted = np.array([r is route for r in found.routes]) & found.is_possible[row]
    if not wanted.any():
        wanted = found.is_possible[row]
    distance = np.where(wanted, np.abs(found.lengths[row] - _TRIAL_LENGTH), np.inf)
    return int(distance.argmin())
