"""Break-even of speculation, as measured: two sums for /metrics."""

from dataclasses import dataclass

from vllm_triforce.controller.measurements import StepTime


@dataclass
class BreakEven:
    """Seconds of steps, summed over the requests whose proposals they verified.

    In a step of ``n`` requests, ``m`` of them with a proposal, that takes ``T`` seconds in place of
    ``plain``, speculation pays if the ``m`` requests gain as much as all ``n`` wait: from
    ``1 + n / m * (T / plain - 1)`` tokens a step. The ratio of the sums is the mean of this.
    """

    speculative_step_seconds: float = 0.0
    plain_step_seconds: float = 0.0

    def add(self, step: StepTime, seconds: float, plain_s: float) -> None:
        """Add a step with proposals that took ``seconds`` in place of ``plain_s``."""
        at_least = step.num_verifying * plain_s
        waited = len(step.tokens) * (seconds - plain_s)
        self.speculative_step_seconds += max(0.0, at_least + waited)
        self.plain_step_seconds += at_least

    def take(self) -> dict[str, float]:
        """Return the sums by their fields of ``LevelCounters``, if any, and begin again."""
        sums = {name: value for name, value in vars(self).items() if value}
        self.speculative_step_seconds = self.plain_step_seconds = 0.0
        return sums
