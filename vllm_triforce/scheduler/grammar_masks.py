"""Grammar bitmasks sized by the drafts of a step, filled in parallel if there are none.

With speculation configured, vLLM's ``StructuredOutputManager`` allocates a bitmask for each of
``num_speculative_tokens + 1`` tokens of ``max_num_seqs`` requests, and fills them one by one. It
reads ``num_speculative_tokens`` from its config. Here that config returns a value for each step.
"""

from vllm_triforce.scheduler import SchedulerBase
from vllm_triforce.vllm_patches import swaps


class _StepConfig:
    """vLLM's config with a ``num_speculative_tokens`` that changes each step."""

    def __init__(self, vllm_config) -> None:
        self._vllm_config = vllm_config
        self.num_speculative_tokens = 0

    def __getattr__(self, name: str):
        return getattr(self._vllm_config, name)


class GrammarMaskMixin(SchedulerBase):
    """Mixin for vLLM's schedulers: steps without drafts fill bitmasks as without speculation."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._step_config = _StepConfig(self.vllm_config)
        swaps.GRAMMAR_CONFIG.set(self.structured_output_manager, self._step_config)

    def get_grammar_bitmask(self, scheduler_output):
        if not scheduler_output.has_structured_output_requests:
            return None
        num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        # vLLM allocates one mask more than this number for each of ``max_num_seqs`` requests.
        self._step_config.num_speculative_tokens = -(-num_drafts // max_num_seqs)
        manager = self.structured_output_manager
        masks = manager._grammar_bitmask
        if masks is not None and len(masks) < max_num_seqs + num_drafts:
            swaps.GRAMMAR_MASKS.set(manager, None)
        return super().get_grammar_bitmask(scheduler_output)
