"""Finding out what present choices do not show, within a share of the time (``allowance.py``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_triforce.controller.allowance import Allowance
from vllm_triforce.controller.choice import Route
from vllm_triforce.controller.options import Candidate, Options
from vllm_triforce.controller.planner import Plan, best_alone
from vllm_triforce.controller.promise import Kind, Promise, kind_of

# Steps with drafts after which a plain one says again what is compared with.
_AUDIT_AGAIN = 16
# Steps of an audit: this one and those of a short rest.
_AUDIT_STEPS = 3
# Steps of plain decoding that promising trials may take beyond what they are worth, at once.
_INVESTED = 8
# Tokens of a trial: what a round of level 1 and level 2 adds, about.
_TRIAL_LENGTH = 3


@dataclass
class _Trial:
    """What a request tries in this step.

    Args:
        charged: seconds of the allowance.
        needed: tokens that have to be accepted for such proposals to pay.
        num_reqs, plain_seconds: of the batch's step.
    """

    kind: Kind
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
        self.trials = Allowance(first=2, most=4)
        self._promising = Allowance(first=_INVESTED, most=_INVESTED)
        """As much time again, for trials after one that was as good as it had to be."""
        self.audits = Allowance(first=0, most=_AUDIT_STEPS)
        self._last_plain = 0
        self._promise = Promise()
        self._turn = 0
        self._waits_since: dict[str, int] = {}
        """Each request's turn at which it came, or had its last trial in vain."""
        self._trying: dict[str, _Trial] = {}

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

    def promise(self, kinds: Sequence[Kind]) -> float:
        """Of requests together; 1 where there are none."""
        return max((self._promise.of(kind) for kind in kinds), default=1.0)

    def promise_of(self, candidates: Sequence[Candidate], found: Options) -> float:
        """Of those candidates that could be tried."""
        could = found.is_possible.any(axis=1)
        return self.promise(
            [kind_of(c.is_greedy, c.context) for c, can in zip(candidates, could) if can]
        )

    def earn(self, seconds: float, plain_seconds: float, promise: float) -> None:
        """For trials, by decoding for so long with steps that are plain in ``plain_seconds``."""
        self.trials.earn(promise * seconds, plain_seconds)
        self._promising.earn(seconds, plain_seconds)

    def begin_turn(self, candidates: Sequence[Candidate]) -> None:
        """There is a decision."""
        self._turn += 1
        for candidate in candidates:
            name = candidate.request_id
            self._waits_since.setdefault(name, self._turn)
            if self._trying.pop(name, None):  # of which nothing was verified
                self._waits_since[name] = self._turn

    def add_trials(
        self,
        columns: np.ndarray,  # [num_reqs], of ``found``; -1 becomes a trial's
        candidates: Sequence[Candidate],
        found: Options,
        alone: Callable[[], Options],
        hopeful: Callable[[], Options],
        plain_seconds: float,
        num_plain: int,
        margin: float,
        first_seconds: float = 0.0,
    ) -> None:
        """Lets requests speculate that would not, as far as the allowance goes: those first that
        have waited longest for it, or one that gains nothing would keep the others from their
        turn. One whose trial paid for itself does not wait anew.

        Args:
            alone: gives the same options with the times of a request that shares its rounds with
                nobody, as it is with most trials.
            hopeful: gives the same options if as much is accepted as may be hoped for.
            num_plain: further requests of the batch.
            first_seconds: what it takes besides that anybody speculates at all; the first trial
                bears it where nobody does.
        """
        more = 0.0 if (columns >= 0).any() else first_seconds
        could = (columns < 0) & found.is_possible.any(axis=1)
        if not could.any() or not self.trials.covers(_cheapest(found, could) + more):
            return
        share, hoped, lonely = plain_seconds / len(columns), hopeful(), alone()
        num_reqs = len(columns) + num_plain
        best, rates = best_alone(hoped, share)
        names = [candidate.request_id for candidate in candidates]
        for row in sorted(np.flatnonzero(could), key=lambda row: self._waits_since[names[row]]):
            if rates[row] <= (1 + margin) / share:
                continue  # nothing to be gained whatever is accepted
            trial = _short(found, row, hoped.routes[best[row]])
            seconds = lonely.next_seconds(row, trial) + more
            if self.trials.spend(seconds):
                columns[row] = trial
                more = 0.0
                its = candidates[row]
                self._trying[names[row]] = _Trial(
                    kind_of(its.is_greedy, its.context),
                    seconds,
                    float(found.seconds[row, trial]) * num_reqs / plain_seconds,
                    num_reqs,
                    plain_seconds,
                )

    def came_of_it(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Level 3 tested a proposal. If it was a trial, the allowance gets back what that was
        worth; and all of it, as far as there is time for that, where as much was accepted as has
        to be: what one request's trial costs the batch is little to what all may gain by it."""
        trial = self._trying.pop(request_id, None)
        if trial is None:
            return
        is_promising = num_accepted >= min(trial.needed, num_drafted)
        self._promise.add(trial.kind, is_promising)
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
