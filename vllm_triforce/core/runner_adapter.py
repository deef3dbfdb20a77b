"""Interface between vLLM's worker and a runner's adapter."""

from abc import ABC, abstractmethod
from typing import Any

from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.kv_groups import attention_layers


class RunnerAdapter(ABC):
    """Base of the adapters in ``runner_v1/runner.py`` and ``runner_v2/runner.py``.

    Hooks that an adapter does not need do nothing.
    """

    vllm_config: Any
    """Config of the draft (``core/own_layers.py``); the target's is the runner's."""

    @property
    def draft_layers(self) -> dict[str, Any]:
        """Return the draft's attention layers by name; none without a draft."""
        return attention_layers(self.vllm_config)

    def calibrate(self) -> None:  # noqa: B027
        """Measure the passes before vLLM compiles and captures graphs."""

    def warm_up(self) -> None:  # noqa: B027
        """Compile after vLLM has captured its graphs."""

    @abstractmethod
    def measured_passes(self, remeasure: bool) -> Measurements | None:
        """Return the seconds that passes take, as measured at start-up.

        None if nothing is chosen by them.

        Args:
            remeasure: measure now, in an engine without requests.
        """

    def begin_step(self, scheduler_output) -> None:  # noqa: B027
        """Prepare a step."""

    def end_step(self, output):
        """Return vLLM's output of a step, with the report attached to it."""
        return output
