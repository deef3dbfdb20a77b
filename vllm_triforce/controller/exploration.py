"""Steps that the plan alone would not make: waits, probes, trials and rests.

Each decision goes through these, in this order:

- a wait, where speculation has lost all that it may lose (``Exploration.observe_loss``);
- a probe of the baseline: three plain steps of a batch that speculates, so that an overestimate of
  the plain step does not last;
- trials: a fixed share of the time for proposals outside the plan;
- a rest, where nothing is proposed: plain steps without a decision.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.lengths import FixedLengths
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.planner import Options, Plan, StepCosts, plan, unshared_seconds
from vllm_triforce.controller.routes import Candidate

# Share of the time for trials. Re-evaluations and baseline probes have the same share each.
TRIAL_SHARE = 0.005
# Steps of plain decoding that are saved for trials, at the start and at most.
MAX_TRIAL_STEPS = 4
# Requests that speculate try another route in every fourth decision.
_OTHER_ROUTES_EVERY = 4
# Tokens of a trial: about one round of levels 1 and 2.
_TRIAL_LENGTH = 3
# Steps after the last proposal until a step is as fast as plain decoding.
_SETTLING_STEPS = 2
# Plain steps of a baseline probe, and steps with proposals before it, at least.
_PROBE_STEPS, _PROBE_AFTER = _SETTLING_STEPS + 1, 16
# At rest one step in eight is timed, which takes the begin of two.
_TIMED_EVERY = 8
# Steps of the first rest after a plan that pays, at least of a long one, so that some are settled
# and timed, and at most. Rests double in between: where proposals pay, the next match is near.
_FIRST_REST, SHORTEST_REST, LONGEST_REST = 1, 4, 128
# Plain steps that the balance of losses begins with, and holds at most: one unlucky proposal may
# take four.
_FIRST_BALANCE, _MAX_BALANCE = 4.0, 16.0
# Plain steps that one step loses at most: a pause of the engine is no loss.
_MAX_LOSS = 4.0
# Steps of a wait at most: a longer one would miss gains in the rest of an answer.
_MAX_WAIT = 32


class SpeculationBackoff:
    """Rests of a batch for which no proposal pays."""

    def __init__(self) -> None:
        self.step = 0
        self._since = 0
        self._until = 0
        self.paid_from = 0
        """Step from which on another decision is paid for."""

    def begin_step(self) -> None:
        self.step += 1

    def begin(self, num_steps: int) -> None:
        """Rest for ``num_steps`` from now on, then decide again."""
        if self.step + num_steps > self._until:
            self._since, self._until = self.step, self.step + num_steps

    def at_most(self, num_steps: int) -> None:
        """Decide in ``num_steps`` at the latest, in this step if it is 0."""
        self._until = min(self._until, self.step + num_steps)

    @property
    def is_resting(self) -> bool:
        return self.step < self._until

    @property
    def rests_next(self) -> bool:
        """True if the batch, unless it changes, rests in the next step too."""
        return self.step + 1 < self._until

    @property
    def is_settled(self) -> bool:
        """True if this step is as fast as plain decoding."""
        return self.is_resting and self.step - self._since >= _SETTLING_STEPS

    @property
    def wants_times(self) -> bool:
        """True if the begin of this step is to be timed; at rest that costs too much for all."""
        num_steps = self.step - self._since
        return not self.is_resting or (num_steps - _SETTLING_STEPS) % _TIMED_EVERY < 2


class Trials:
    """Proposals of requests that decode plainly, or by another route than planned."""

    def __init__(self) -> None:
        # Seconds that may be spent, and that may be saved.
        self._balance_s, self._max_s = math.inf, 0.0
        self._num_decisions = 0
        self.waiting_since: dict[str, int] = {}
        """Decision in which a request came, or had its last trial."""
        self._pending: dict[str, tuple[str, float, int, float]] = {}
        """Each request's last trial without an outcome: seconds that were spent, and the requests
        and the plain seconds of its step."""

    def earn(self, seconds: float, plain_s: float) -> None:
        """Save the share of ``seconds`` of decoding, up to a few plain steps."""
        self._max_s = MAX_TRIAL_STEPS * plain_s
        self._save(TRIAL_SHARE * seconds)

    def _save(self, seconds: float) -> None:
        self._balance_s = min(self._balance_s + seconds, self._max_s)

    def add(
        self,
        columns: np.ndarray,  # [num_reqs] int, of ``options``; a trial's column replaces it
        candidates: Sequence[Candidate],
        options: Options,
        optimistic: Callable[[], Options],  # with prior acceptance
        costs: StepCosts,
    ) -> bool:
        """Start trials while the budget lasts, longest-waiting request first; True if any."""
        self._num_decisions += 1
        for candidate in candidates:
            self.waiting_since.setdefault(candidate.request_id, self._num_decisions)
        routes = np.array(options.routes)
        planned_routes = np.where(columns >= 0, routes[columns], "")
        is_trial = options.is_possible & (routes != planned_routes[:, None])
        if self._num_decisions % _OTHER_ROUTES_EVERY:
            is_trial[columns >= 0] = False
        fixed_s = 0.0
        if (columns < 0).all():
            # The first trial pays for the decision after it, and for verifying any drafts.
            fixed_s = costs.speculating_s + costs.model.decision_s
        is_long = is_trial & (options.lengths >= _TRIAL_LENGTH)
        cheapest_s = options.seconds[is_long if is_long.any() else is_trial].min(initial=np.inf)
        if cheapest_s + fixed_s > self._balance_s:
            return False
        trials, lost_s = _informative_trials(columns, is_trial, options, optimistic().tokens, costs)

        def turn(row: int) -> tuple[bool, int]:  # requests that decode plainly come first
            return columns[row] >= 0, self.waiting_since[candidates[row].request_id]

        num_reqs, num_trials = len(columns) + costs.num_plain, 0
        for row in sorted(np.flatnonzero(trials >= 0), key=turn):
            trial = int(trials[row])
            alone = np.full(len(columns), -1)
            alone[row] = trial  # no other request shares its passes
            cost_s = float(options.seconds[row, trial] + unshared_seconds(options, alone, costs))
            cost_s += lost_s[row] + fixed_s
            if cost_s > self._max_s:
                continue
            if cost_s > self._balance_s:
                break  # save for the request whose turn it is
            self._balance_s -= cost_s
            columns[row], fixed_s, num_trials = trial, 0.0, num_trials + 1
            request_id = candidates[row].request_id
            self.waiting_since[request_id] = self._num_decisions
            route = options.choice(row, trial).route
            self._pending[request_id] = route, cost_s, num_reqs, costs.plain_s
        return num_trials > 0

    def on_verified(self, request_id: str, route: str, num_accepted: int) -> None:
        """Refund the seconds that a trial's accepted tokens save, by the rule of ``plan()``.

        On Runner V2 the outcome of an earlier proposal, by another route, may come first.
        """
        if self._pending.get(request_id, ("",))[0] == route:
            _, cost_s, num_reqs, plain_s = self._pending.pop(request_id)
            self._save(min(cost_s, ((1 + num_accepted) ** (1 / num_reqs) - 1) * plain_s))

    def release(self, request_id: str) -> None:
        self.waiting_since.pop(request_id, None)
        self._pending.pop(request_id, None)


def _informative_trials(
    columns: np.ndarray,  # [num_reqs] int, of the plan
    is_trial: np.ndarray,  # [num_reqs, num_options] bool
    options: Options,
    optimistic_tokens: np.ndarray,  # [num_reqs, num_options], with prior acceptance
    costs: StepCosts,
) -> tuple[np.ndarray, np.ndarray]:
    """Return each request's trial that may show a gain, -1 for none, and the seconds it loses."""
    rows, num_reqs = np.arange(len(columns)), len(columns) + costs.num_plain
    share_s = costs.plain_s / num_reqs
    tokens = np.where(columns >= 0, options.tokens[rows, columns], 0)
    seconds = np.where(columns >= 0, options.seconds[rows, columns], 0)
    thresholds = (1 + costs.model.error) * (1 + tokens) / (share_s + seconds)
    speeds = np.where(is_trial, (1 + optimistic_tokens) / (share_s + options.seconds), -np.inf)
    routes = np.array(options.routes)
    is_route = options.is_possible & (routes == routes[speeds.argmax(1)][:, None])
    distances = np.abs(options.lengths - _TRIAL_LENGTH)
    trials = np.where(is_route, distances, np.inf).argmin(1)
    # None where no trial would pay. A trial that seems to pay already was not planned because
    # others would lose, so it finds out nothing.
    trial_s = share_s + options.seconds[rows, trials]
    is_known = 1 + options.tokens[rows, trials] > thresholds * trial_s
    trials[is_known | (speeds.max(1) <= thresholds)] = -1
    # A trial in a proposal's place costs the tokens that it would have gained, and saves its
    # seconds.
    step_share_s = (costs.plain_s + seconds.sum()) / num_reqs
    return trials, np.maximum(0, step_share_s * np.log1p(tokens) - seconds)


class Exploration:
    """Chooses the columns of a batch's options, by the plan and beside it."""

    def __init__(self, max_slowdown: float, fixed: FixedLengths) -> None:
        self._max_slowdown = max_slowdown
        self._fixed = fixed
        self.trials = Trials()
        self.backoff = SpeculationBackoff()
        self._last_plain_step = self._wait_since = self._wait_until = 0
        self._next_rest = SHORTEST_REST

    def choose(
        self,
        candidates: Sequence[Candidate],
        options: Options,
        optimistic: Callable[[], Options],
        costs: StepCosts,
        measured: CostModel,
        num_steps: int,
    ) -> tuple[np.ndarray, bool]:
        """Choose an option for each candidate.

        Args:
            optimistic: builds the options with prior acceptance.
            measured: learned costs; ``costs.model`` may be a copy.
            num_steps: steps since the decision before.

        Returns:
            Columns, -1 for plain decoding, [num_reqs]; and True if they are the best plan, which
            may be repeated.
        """
        has_seed, plain_s = any(c.has_seed for c in candidates), costs.plain_s
        nothing = np.full(len(candidates), -1)
        if num_to_wait := self._steps_to_wait(costs.model, plain_s):
            self.backoff.begin(1 if has_seed else num_to_wait)
            return nothing, False
        best = plan(options, costs, self._max_slowdown)
        if not has_seed and self._probe_is_due(best, plain_s):
            self.backoff.begin(_PROBE_STEPS)
            return nothing, False
        columns = best.options
        if not best.is_plain:
            self._next_rest = _FIRST_REST
        self.trials.earn(num_steps * best.seconds, plain_s)
        has_trials = self.trials.add(columns, candidates, options, optimistic, costs)
        if (columns < 0).all():
            num_to_rest = self._begin_rest(candidates, costs)
            measured.forget_a_little(num_to_rest)
            if measured.balance_s is not None:
                earned_s = self._max_slowdown * num_to_rest * plain_s
                self._add_to_balance(measured, earned_s, plain_s)
        return columns, not (has_trials or has_seed)

    # Losses.

    def observe_loss(self, costs: CostModel, step: StepTime) -> None:
        """Add a step with proposals to the balance of losses.

        A step of ``T`` seconds that gave each request ``n`` tokens on average, for which plain
        decoding needs ``n`` plain steps, changes the balance by ``n * plain - T``, plus
        ``max_slowdown`` of all time. Below zero speculation has lost all that it may. Steps of
        requests with a seed do not count: these propose whether that pays or not.
        """
        if step.has_seed or not costs.overheads or self._max_slowdown >= 1:
            return  # without a plain step nothing is known to compare with
        num_reqs = len(step.tokens)
        plain_s = costs.plain_step(step.contexts, num_reqs, step.is_greedy)
        seconds = (1 - self._max_slowdown) * (step.seconds + step.proposal_seconds)
        gained_s = (1 + step.num_accepted / num_reqs) * plain_s - seconds
        self._add_to_balance(costs, max(gained_s, -_MAX_LOSS * plain_s), plain_s)

    def _add_to_balance(self, costs: CostModel, seconds: float, plain_s: float) -> None:
        balance_s = _FIRST_BALANCE * plain_s if costs.balance_s is None else costs.balance_s
        costs.balance_s = min(_MAX_BALANCE * plain_s, balance_s + seconds)

    def _steps_to_wait(self, costs: CostModel, plain_s: float) -> int:
        """Return the steps until the balance would hold a plain step, 0 above zero.

        Requests that join, and seeded ones, are decided on meanwhile, but do not end a wait.
        """
        step, balance_s = self.backoff.step, costs.balance_s
        if balance_s is not None and balance_s < 0:
            if step > self._wait_until:
                self._wait_since = self._wait_until = step
            # Else this was lost by proposals that were under way when the wait began.
            num_steps = int((plain_s - balance_s) / (self._max_slowdown * plain_s))
            self._wait_until = min(self._wait_since + _MAX_WAIT, self._wait_until + num_steps)
            costs.balance_s = plain_s
        return max(0, self._wait_until - step)

    # Probes and rests.

    def _probe_is_due(self, best: Plan, plain_s: float) -> bool:
        """True if the baseline, which speculation is compared with, was not timed for long.

        A probe takes at most the share of the time that trials have.
        """
        num_steps = self.backoff.step - self._last_plain_step
        lost_s = _PROBE_STEPS * plain_s * (1 - 1 / best.speedup)
        may_lose_s = TRIAL_SHARE * num_steps * best.seconds
        if best.is_plain or num_steps < _PROBE_AFTER or lost_s > may_lose_s:
            return False
        self._last_plain_step = self.backoff.step
        return True

    def _begin_rest(self, candidates: Sequence[Candidate], costs: StepCosts) -> int:
        """Begin a rest after a decision to speculate nowhere, and return its steps.

        In the long run decisions, ``decision_s`` of delay each, take at most the time of trials.
        """
        num_paid = min(round(costs.model.decision_s / (TRIAL_SHARE * costs.plain_s)), LONGEST_REST)
        self.backoff.paid_from = self.backoff.step + num_paid
        num_steps = min(self._next_rest, max(SHORTEST_REST, num_paid))
        self._next_rest = 2 * num_steps
        for candidate in candidates:
            if candidate.has_seed:  # no rest may delay its speculation
                num_steps = min(num_steps, max(1, self._fixed.tokens_until(candidate)))
        if num_steps > _SETTLING_STEPS:  # shorter rests have no step that is timed
            self._last_plain_step = self.backoff.step
        self.trials.earn(num_steps * costs.plain_s, costs.plain_s)
        self.backoff.begin(num_steps)
        return num_steps
