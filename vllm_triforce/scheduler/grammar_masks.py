"""Grammar bitmasks sized by the drafts of a step, filled in parallel if there are none.

With speculation configured, vLLM's ``StructuredOutputManager`` allocates a bitmask for each of
``num_speculative_tokens + 1`` tokens of ``max_num_seqs`` requests, and fills them one by one. It
reads ``num_speculative_tokens`` from its config. Here that config returns a value for each step.
"""

from vllm.v1.structured_output import StructuredOutputManager

from vllm_triforce.scheduler import SchedulerBase
from vllm_triforce.vllm_patches import swaps


class _StepConfig:
    """vLLM's config with a ``num_speculative_tokens`` that changes each step."""

    def __init__(self, vllm_config) -> None:
        self._vllm_config = vllm_config
        self.num_speculative_tokens = 0

    def __getattr__(self, name: str):
        return getattr(self._vllm_config, name)


class StepMasks(StructuredOutputManager):
    """The scheduler's manager, with the state of the engine core's, which compiles grammars."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self.__dict__ = manager.__dict__
        self._step_config = _StepConfig(manager.vllm_config)
        swaps.GRAMMAR_CONFIG.set(manager, self._step_config)

    def grammar_bitmask(self, requests, request_ids, drafts):
        num_drafts = sum(map(len, drafts.values()))
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        # vLLM allocates one mask more than this number for each of ``max_num_seqs`` requests.
        self._step_config.num_speculative_tokens = -(-num_drafts // max_num_seqs)
        masks = self._grammar_bitmask
        if masks is not None and len(masks) < max_num_seqs + num_drafts:
            self._grammar_bitmask = None
        return super().grammar_bitmask(requests, request_ids, drafts)


class GrammarMaskMixin(SchedulerBase):
    """Mixin for vLLM's schedulers: steps without drafts fill bitmasks as without speculation."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.structured_output_manager = StepMasks(self.structured_output_manager)
