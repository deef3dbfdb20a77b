"""What the worker asks of a runner's adapter, where it has nothing to do."""

from vllm_triforce.controller.measurements import Measurements


class RunnerAdapter:
    """Base of ``v1/runner.py``'s and ``v2/runner.py``'s."""

    def calibrate(self) -> None:
        """Before vLLM compiles and captures."""

    def warm_up(self) -> None:
        """Behind that."""

    def measured_passes(self, anew: bool) -> Measurements | None:
        """What passes take: as found at start-up, None where nothing is chosen by it; or ``anew``,
        where there are no requests."""
        raise NotImplementedError

    def begin_step(self, scheduler_output) -> None:
        """A step comes."""

    def end_step(self, output):
        """``output``, vLLM's of the step, with what is to go with it."""
        return output
