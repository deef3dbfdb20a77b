"""Limit of measured losses: the time that speculation may have cost against plain decoding.

A step with proposals that took ``T`` seconds gave each request ``n`` tokens on average, for which
plain decoding needs ``n`` plain steps. The balance changes by ``n * plain - T``, plus
``max_slowdown`` of all time. It begins with a few plain steps, and holds not many more. Below zero
speculation has lost all that it may: the batch decodes plainly until it has earned a plain step.

Steps of requests with a seed do not count: these propose whether that pays or not.
"""

from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.measurements import StepTime

# Plain steps that the balance begins with, and holds at most: one unlucky proposal may take four.
_FIRST_STEPS, _MAX_STEPS = 4.0, 16.0
# Plain steps that one step loses at most: a pause of the engine is no loss.
_MAX_LOSS = 4.0
# Steps of a wait at most: a longer one would miss gains in the rest of an answer.
_MAX_WAIT = 32


class LossLimit:
    """Keeps ``CostModel.balance_s``, and waits after losses.

    Args:
        max_slowdown: key of that name; 1 sets no limit.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._share = max_slowdown
        self._until_step: int | None = None
        """End of the present wait."""

    def observe_step(self, costs: CostModel, step: StepTime) -> None:
        """Add a step with proposals."""
        if step.has_seed or not costs.overheads or self._share >= 1:
            return  # without a plain step nothing is known to compare with
        num_reqs = len(step.tokens)
        plain_s = costs.plain_step(step.contexts, num_reqs, step.is_greedy)
        seconds = step.seconds + step.proposal_seconds
        gained_s = (1 + step.num_accepted / num_reqs) * plain_s - (1 - self._share) * seconds
        self._add(costs, max(gained_s, -_MAX_LOSS * plain_s), plain_s)

    def add_rest(self, costs: CostModel, num_steps: int, plain_s: float) -> None:
        """Add plain steps."""
        if costs.balance_s is not None:
            self._add(costs, self._share * num_steps * plain_s, plain_s)

    def _add(self, costs: CostModel, seconds: float, plain_s: float) -> None:
        balance_s = _FIRST_STEPS * plain_s if costs.balance_s is None else costs.balance_s
        costs.balance_s = min(_MAX_STEPS * plain_s, balance_s + seconds)

    @property
    def is_waiting(self) -> bool:
        return self._until_step is not None

    def begin_wait(self, costs: CostModel, step: int, plain_s: float) -> None:
        """Wait from ``step`` on until the balance would hold a plain step."""
        num_steps = (plain_s - (costs.balance_s or 0.0)) / (self._share * plain_s)
        self._until_step = step + min(_MAX_WAIT, int(num_steps))

    def steps_left(self, step: int) -> int:
        """Return for how many steps the batch has to decode plainly."""
        return 0 if self._until_step is None else max(0, self._until_step - step)

    def end_wait(self, costs: CostModel, plain_s: float) -> None:
        """End the wait; losses that were reported during it belong to the one before it."""
        self._until_step = None
        costs.balance_s = plain_s
