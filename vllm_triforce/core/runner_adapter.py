"""What the worker asks of a runner's adapter, where it has nothing to do."""

from abc import ABC, abstractmethod

from vllm_triforce.controller.measurements import Measurements


class RunnerAdapter(ABC):
    """Base of ``v1/runner.py``'s and ``v2/runner.py``'s."""

    def calibrate(self) -> None:  # noqa: B027
        """Before vLLM compiles and captures."""

    def warm_up(self) -> None:  # noqa: B027
        """Behind that."""

    @abstractmethod
    def measured_passes(self, anew: bool) -> Measurements | None:
        """What passes take: as found at start-up, None where nothing is chosen by it; or ``anew``,
        where there are no requests."""

    def begin_step(self, scheduler_output) -> None:  # noqa: B027
        """A step comes."""

    def end_step(self, output):
        """``output``, vLLM's of the step, with what is to go with it."""
        return output
