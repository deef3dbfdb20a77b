"""How much of the time of decoding goes into model passes, and what is beside them."""

import time
from dataclasses import dataclass


@dataclass
class PassTimes:
    """Seconds inside the models of an engine in this process; on a GPU, those of launching."""

    seconds: float = 0.0
    num_passes: int = 0

    def watch(self, llm) -> None:
        """Times the passes of the target and, where there is one, of the draft."""
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._watch_model(worker.model_runner.model)
        draft = getattr(getattr(worker, "triforce", None), "model", None)
        if draft is not None:
            self._watch_model(draft)

    def _watch_model(self, model) -> None:
        model.forward = self._timed(model.forward, is_pass=True)
        model.compute_logits = self._timed(model.compute_logits, is_pass=False)

    def _timed(self, function, is_pass: bool):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.num_passes += is_pass

        return timed


@dataclass
class Mark:
    """Where a step of the engine ended."""

    when: float
    """Seconds since the batch was handed over."""
    pass_seconds: float
    num_passes: int


def outside_passes(marks: list[Mark]) -> dict | None:
    """What is beside the passes, from the first mark to the last.

    Returns:
        share of the time, milliseconds of a step, passes of a step; None for less than two marks.
    """
    if len(marks) < 2:
        return None
    first, last, num_steps = marks[0], marks[-1], len(marks) - 1
    seconds = last.when - first.when
    outside = seconds - (last.pass_seconds - first.pass_seconds)
    return {
        "share": outside / seconds,
        "ms_a_step": 1e3 * outside / num_steps,
        "passes_a_step": (last.num_passes - first.num_passes) / num_steps,
    }
