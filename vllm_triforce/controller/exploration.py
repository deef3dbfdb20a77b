"""Steps that the plan alone would not make: waits, probes, trials and rests.

Each decision goes through these, in this order:

- a wait, where speculation has lost all that it may lose (``losses.py``);
- a probe of the baseline: three plain steps of a batch that speculates, so that an overestimate of
  the plain step does not last;
- trials of proposals outside the plan (``trials.py``);
- a rest, where nothing is proposed (``backoff.py``): plain steps without a decision.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vllm_triforce.controller.backoff import PROBE_STEPS, SpeculationBackoff
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.lengths import FixedLengths
from vllm_triforce.controller.losses import LossLimit
from vllm_triforce.controller.options import Candidate, Options
from vllm_triforce.controller.planner import Plan, StepCosts, plan
from vllm_triforce.controller.trials import TRIAL_SHARE, Trials

# Steps with proposals before the baseline is probed, at least.
_PROBE_AFTER = 16


class Exploration:
    """Chooses the columns of a batch's options, by the plan and beside it.

    Args:
        max_slowdown: key of that name.
    """

    def __init__(self, max_slowdown: float, fixed: FixedLengths) -> None:
        self._max_slowdown = max_slowdown
        self._fixed = fixed
        self.losses = LossLimit(max_slowdown)
        self.trials = Trials()
        self.backoff = SpeculationBackoff()
        self._last_plain_step = 0

    def choose(
        self,
        candidates: Sequence[Candidate],
        options: Options,
        optimistic: Callable[[], Options],
        costs: StepCosts,
        measured: CostModel | None,
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
        self.trials.begin_decision(candidates)
        has_seed, plain_s = any(c.has_seed for c in candidates), costs.plain_s
        nothing = np.full(len(candidates), -1)
        if num_to_wait := self._steps_to_wait(costs, measured):
            self.backoff.begin(1 if has_seed else num_to_wait)
            return nothing, False
        best = plan(options, costs, self._max_slowdown)
        if not has_seed and self._probe_is_due(best, plain_s):
            self.backoff.begin_probe()
            return nothing, False
        columns = best.options
        self.trials.budget.earn(num_steps * best.seconds, plain_s)
        has_trials = self.trials.add(columns, candidates, options, optimistic, costs)
        if (columns < 0).all():
            num_to_rest = self._begin_rest(candidates, costs.model.decision_s, plain_s)
            if measured is not None:
                measured.forget_a_little(num_to_rest)
                self.losses.add_rest(measured, num_to_rest, plain_s)
        return columns, not (has_trials or has_seed)

    def _steps_to_wait(self, costs: StepCosts, measured: CostModel | None) -> int:
        """Return for how many steps losses forbid speculation."""
        step = self.backoff.step
        if self.losses.is_waiting and not self.losses.steps_left(step):
            for model in filter(None, (costs.model, measured)):
                self.losses.end_wait(model, costs.plain_s)
        elif costs.model.has_lost and not self.losses.is_waiting:
            self.losses.begin_wait(costs.model, step, costs.plain_s)
        return self.losses.steps_left(step)

    def _probe_is_due(self, best: Plan, plain_s: float) -> bool:
        """True if the baseline, which speculation is compared with, was not timed for long.

        A probe takes at most the share of the time that trials have.
        """
        step = self.backoff.step
        if best.is_plain:
            self._last_plain_step = step
            return False
        num_steps = step - self._last_plain_step
        lost_s = PROBE_STEPS * plain_s * (1 - 1 / best.speedup)
        if num_steps < _PROBE_AFTER or lost_s > TRIAL_SHARE * num_steps * best.seconds:
            return False
        self._last_plain_step = step
        return True

    def _begin_rest(
        self, candidates: Sequence[Candidate], decision_s: float, plain_s: float
    ) -> int:
        """Begin a rest, and return its steps."""
        num_steps = self.backoff.next_rest(decision_s, plain_s)
        for candidate in candidates:
            if candidate.has_seed:  # no rest may delay its speculation
                num_steps = min(num_steps, max(1, self._fixed.tokens_until(candidate)))
        self.trials.budget.earn(num_steps * plain_s, plain_s)
        self.backoff.begin(num_steps)
        return num_steps
