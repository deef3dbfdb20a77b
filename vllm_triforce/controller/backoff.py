"""Rests: steps that decode plainly without a decision."""

from vllm_triforce.controller.trials import TRIAL_SHARE

# Steps after the last proposal until a step is as fast as plain decoding.
_SETTLING_STEPS = 2
# Plain steps of a baseline probe.
PROBE_STEPS = _SETTLING_STEPS + 1
# At rest one step in eight is timed, which takes the begin of two.
_TIMED_EVERY = 8
# Steps of a rest: at least, so that some are settled and timed; and at most.
SHORTEST_REST, LONGEST_REST = 4, 128


class SpeculationBackoff:
    """Rests of a batch for which no proposal pays."""

    def __init__(self) -> None:
        self.step = 0
        self._since = 0
        self._until = 0
        self._paid_from = 0
        """Step from which on another decision is paid for."""

    def begin_step(self) -> None:
        self.step += 1

    def begin(self, num_steps: int) -> None:
        """Rest for ``num_steps`` from now on, then decide again."""
        if self.step + num_steps > self._until:
            self._since, self._until = self.step, self.step + num_steps

    def at_most(self, num_steps: int) -> None:
        """Decide in ``num_steps`` at the latest."""
        self._until = min(self._until, self.step + num_steps)

    def begin_probe(self) -> None:
        """Rest until a plain step has been timed."""
        self.begin(PROBE_STEPS)

    def reset(self) -> None:
        """Decide in this step."""
        self._until = 0

    def on_requests_joined(self) -> None:
        """Decide as soon as a decision is paid for, and not in the step that reads a prompt."""
        if self.is_resting:
            self._until = min(self._until, max(self.step + 1, self._paid_from))

    def next_rest(self, decision_s: float, plain_s: float) -> int:
        """Return the steps of a rest after a decision to speculate nowhere.

        A decision takes at most the share of the time that trials have.

        Args:
            decision_s: seconds by which it delays the batch.
            plain_s: of a plain step.
        """
        paid = min(round(decision_s / (TRIAL_SHARE * plain_s)), LONGEST_REST)
        self._paid_from = self.step + paid
        return max(SHORTEST_REST, paid)

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
