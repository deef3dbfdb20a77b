"""Limit of measured losses: what speculation may have cost against plain decoding.

A step with proposals that took ``T`` seconds gave each request ``n`` tokens on average, for which
plain decoding needs ``n`` plain steps. The balance changes by ``n * plain - T``, plus
``max_slowdown`` of the time. It begins with a few plain steps, and holds not many more. Below zero
speculation has lost as much as it may: the batch decodes plainly until it has earned a plain step.
"""

from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.measurements import StepTime

# Plain steps that the balance begins with, and holds at most: one unlucky proposal may take four.
_FIRST_STEPS, _MAX_STEPS = 4.0, 8.0


class LossLimit:
    """Keeps ``CostModel.balance_s``.

    Args:
        max_slowdown: key of that name; 1 sets no limit.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._share = max_slowdown
        self._until_step = 0

    def observe_step(self, costs: CostModel, step: StepTime) -> None:
        """Add a step with proposals."""
        num_reqs = len(step.tokens)
        pass_s = costs.full_pass([1] * num_reqs, step.contexts)
        plain_s = pass_s + costs.overhead(num_reqs, step.is_greedy)
        seconds = step.seconds + step.proposal_seconds
        gained_s = (1 + step.num_accepted / num_reqs) * plain_s - (1 - self._share) * seconds
        balance_s = _FIRST_STEPS * plain_s if costs.balance_s is None else costs.balance_s
        costs.refill_balance(min(_MAX_STEPS * plain_s, balance_s + gained_s))

    def begin_wait(self, costs: CostModel, step: int, plain_s: float) -> None:
        """Wait from ``step`` on until the balance holds a plain step."""
        num_steps = (plain_s - (costs.balance_s or 0.0)) / (self._share * plain_s)
        self._until_step = step + int(num_steps)

    def steps_left(self, step: int) -> int:
        """Return for how many steps the batch has to decode plainly."""
        return max(0, self._until_step - step)
