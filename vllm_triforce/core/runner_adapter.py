"""Interface between vLLM's worker and a runner's adapter."""

from collections.abc import Callable
from typing import Any

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.kv_groups import attention_layers
from vllm_triforce.core.models import (
    aux_layers,
    emit_states,
    load_level2_model,
    loading_draft,
    warm_up,
)
from vllm_triforce.vllm_patches import swaps


class RunnerAdapter:
    """Base of the adapters in ``runner_v1/runner.py`` and ``runner_v2/runner.py``.

    Hooks that an adapter does not need do nothing. Both have ``begin_step(scheduler_output)``, and
    ``end_step(output)``, which attaches their message to vLLM's output of the step.
    """

    vllm_config: Any
    """Config of the draft (``with_own_layers()``); the target's is the runner's."""
    model: Any
    """The draft; no attribute, or None, where there is none."""
    device: Any

    def set_up(self, runner, config: ResolvedConfig, draft_name: str | None) -> None:
        """Take vLLM's runner, before it loads its model."""
        self._runner = runner
        self.config = config
        self._draft_name = draft_name
        if config.has_head and aux_layers(self.vllm_config):
            swaps.AUX_STATES.set(runner, True)

    def load_models(self, target, load_draft: Callable[[], None]) -> None:
        """Load the models of levels 1 and 2, where they are not the target.

        ``load_draft`` sets ``model``.
        """
        target_config = self._runner.vllm_config
        self.target_layers = attention_layers(target_config)
        if self._draft_name is not None:
            with loading_draft(self._draft_name):
                load_draft()
        self.supports_mm_inputs = False  # or vLLM would gather the embeddings of images for it
        self.level2_model = load_level2_model(
            self.config.level2_model, target, self.target_layers, target_config
        )
        if self.config.has_head and self._draft_name is not None:
            with loading_draft(self._draft_name):
                emit_states(target, self.level2_model.model, self.vllm_config)

    def compile_models(self) -> None:
        """Compile the draft and level 2's copy, by a pass of each."""
        if self._draft_name is not None:
            warm_up(self.model, self.vllm_config, self.device)
        if self.level2_model.is_copy:
            copy, copy_config, _ = self.level2_model
            warm_up(copy, copy_config, self.device, is_copy=True)

    @property
    def draft_layers(self) -> dict[str, Any]:
        """Attention layers by name; none without a draft."""
        return attention_layers(self.vllm_config)

    def calibrate(self) -> None:
        """Measure the passes before vLLM compiles and captures graphs."""

    def warm_up(self) -> None:
        """Compile after vLLM has captured its graphs."""

    def synchronize_times(self, synchronize: bool) -> None:
        """Wait for the device wherever a part is timed, unless the host reads every result."""
