"""What the worker asks of a runner's adapter, where it has nothing to do."""


class RunnerAdapter:
    """Base of ``v1/runner.py``'s and ``v2/runner.py``'s."""

    def calibrate(self) -> None:
        """Before vLLM compiles and captures."""

    def warm_up(self) -> None:
        """Behind that."""

    def begin_step(self, scheduler_output) -> None:
        """A step comes."""

    def end_step(self, output):
        """``output``, vLLM's of the step, with what is to go with it."""
        return output
