"""Masks of grammars as many as a step needs, filled in parallel where nobody has drafts.

Once speculation is configured, vLLM's ``StructuredOutputManager`` makes a mask for each of
``num_speculative_tokens + 1`` places of ``max_num_seqs`` requests, and fills them one by one
however many there are. It reads that number from its configuration, which here answers by step.
"""

from typing import Any

from vllm_triforce.vllm_patches import swaps


class _ConfigOfStep:
    """vLLM's configuration, in which ``num_speculative_tokens`` is a step's."""

    def __init__(self, vllm_config) -> None:
        self._vllm_config = vllm_config
        self.num_speculative_tokens = 0

    def __getattr__(self, name: str):
        return getattr(self._vllm_config, name)


class GrammarMaskMixin:
    """Over a scheduler of vLLM's: grammars cost what they cost without speculation, until a step
    has drafts."""

    # The scheduler's own.
    vllm_config: Any
    structured_output_manager: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._config_of_step = _ConfigOfStep(self.vllm_config)
        swaps.GRAMMAR_CONFIG.set(self.structured_output_manager, self._config_of_step)

    def get_grammar_bitmask(self, scheduler_output):
        if not scheduler_output.has_structured_output_requests:
            return None
        num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        # vLLM makes 1 + this many masks for each of ``max_num_seqs`` requests: enough for the step.
        self._config_of_step.num_speculative_tokens = -(-num_drafts // max_num_seqs)
        manager = self.structured_output_manager
        masks = manager._grammar_bitmask
        if masks is not None and len(masks) < max_num_seqs + num_drafts:
            swaps.GRAMMAR_MASKS.set(manager, None)
        return super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
