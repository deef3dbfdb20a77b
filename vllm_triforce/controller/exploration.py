"""Finding out what present choices do not show, within a share of the time (``allowance.py``)."""

from collections.abc import Callable, Sequence

import numpy as np

from vllm_triforce.controller.allowance import Allowance
from vllm_triforce.controller.choice import Route
from vllm_triforce.controller.options import Options
from vllm_triforce.controller.planner import Plan, best_alone

# Steps with drafts after which a plain one says again what is compared with.
_AUDIT_AGAIN = 16
# Steps of an audit: this one and those of a short rest.
_AUDIT_STEPS = 3
# Tokens of a trial: what a round of level 1 and level 2 adds, about.
_TRIAL_LENGTH = 3


class Exploration:
    """Trials of requests that decode plainly, and plain steps of batches that speculate."""

    def __init__(self) -> None:
        self.trials = Allowance(first=2, most=4)
        self.audits = Allowance(first=0, most=_AUDIT_STEPS)
        self._last_plain = 0

    def audits_now(self, step: int, best: Plan, plain_seconds: float, has_seed: bool) -> bool:
        """Whether the next steps decode plainly to see what that takes by now: it is what
        speculation is compared with, and unseen it could be overrated for long."""
        self.audits.earn(best.seconds, plain_seconds)
        if best.is_plain:
            self._last_plain = step
            return False
        if step - self._last_plain < _AUDIT_AGAIN or has_seed:
            return False
        if not self.audits.spend(_AUDIT_STEPS * plain_seconds * (1 - 1 / best.speedup)):
            return False
        self._last_plain = step
        return True

    def add_trials(
        self,
        columns: np.ndarray,  # [num_reqs], of ``found``; -1 becomes a trial's
        found: Options,
        hopeful: Callable[[], Options],
        plain_seconds: float,
        margin: float,
        num_tested: Sequence[float],
        first_seconds: float = 0.0,
    ) -> dict[int, float]:
        """Lets requests speculate that would not, as far as the allowance goes: those first of
        whom least is known, or one that gains nothing would keep the others from their turn.

        Args:
            hopeful: gives the same options if as much is accepted as may be hoped for.
            num_tested: tokens of each request that level 3 has tested.
            first_seconds: what it takes besides that anybody speculates at all; the first trial
                bears it where nobody does.

        Returns:
            The rows that were let, and the seconds that each was charged.
        """
        charged: dict[int, float] = {}
        more = 0.0 if (columns >= 0).any() else first_seconds
        could = (columns < 0) & found.is_possible.any(axis=1)
        if not could.any() or not self.trials.covers(_cheapest(found, could) + more):
            return charged
        share, hoped = plain_seconds / len(columns), hopeful()
        best, rates = best_alone(hoped, share)
        for row in sorted(np.flatnonzero(could), key=lambda row: num_tested[row]):
            if rates[row] <= (1 + margin) / share:
                continue  # nothing to be gained whatever is accepted
            trial = _short(found, row, hoped.routes[best[row]])
            seconds = found.next_seconds(row, trial) + more
            if self.trials.spend(seconds):
                columns[row], charged[row] = trial, seconds
                more = 0.0
        return charged


def _cheapest(found: Options, could: np.ndarray) -> float:
    """Seconds below which none of these requests has a trial."""
    is_trial = found.is_possible & could[:, None]
    if (is_trial & (found.lengths >= _TRIAL_LENGTH)).any():
        is_trial &= found.lengths >= _TRIAL_LENGTH
    return float(found.seconds[is_trial].min())


def _short(found: Options, row: int, route: Route) -> int:
    """The column of a short proposal by a route."""
    wanted = np.array([r is route for r in found.routes]) & found.is_possible[row]
    if not wanted.any():
        wanted = found.is_possible[row]
    distance = np.where(wanted, np.abs(found.lengths[row] - _TRIAL_LENGTH), np.inf)
    return int(distance.argmin())
