"""Attributes that TriForce sets on vLLM's objects, in engines that run TriForce.

The ledger (patches/README.md) has the reason for each, and the condition under which it can be
deleted. A test forbids other such writes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Swap:
    """Attribute of a vLLM object that TriForce replaces; ``patch.py`` wraps those of classes."""

    name: str  # the object's class or module, and the attribute after the last dot
    is_new: bool = False  # True if vLLM's object lacks the attribute

    def set(self, owner: Any, value: Any) -> Any:
        """Set the attribute on ``owner`` and return the previous value, or None.

        Raises:
            AttributeError: this vLLM's object lacks the attribute, so nothing would read it.
        """
        attribute = self.name.rpartition(".")[2]
        if not self.is_new and not hasattr(owner, attribute):
            raise AttributeError(
                f"vllm-triforce sets {attribute!r}, which this vLLM's {type(owner).__name__} does "
                "not have. Install a supported vLLM, or drop method='triforce'."
            )
        before = getattr(owner, attribute, None)
        setattr(owner, attribute, value)
        return before

    @contextmanager
    def during(self, owner: Any, value: Any) -> Iterator[None]:
        """Set the attribute while entered."""
        # By ``vars``, so that a static method stays one and nothing inherited is copied.
        attribute, missing = self.name.rpartition(".")[2], object()
        before = vars(owner).get(attribute, missing)
        self.set(owner, value)
        try:
            yield
        finally:
            if before is missing:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)


DRAFTER = Swap("GPUModelRunner (V1).drafter")
SPECULATOR = Swap("GPUModelRunner (V2).speculator")
AUX_STATES = Swap("GPUModelRunner.use_aux_hidden_state_outputs")
HEAD_LAYERS = Swap("hf_config of an EAGLE-3 head.eagle_aux_hidden_state_layer_ids", is_new=True)
NUM_HEAD_LAYERS = Swap("hf_config of an EAGLE-3 head.num_aux_hidden_states", is_new=True)
DRAFT_TOKENS_HANDLER = Swap("GPUModelRunner (V2).draft_tokens_handler")
VARLEN_DECODE = Swap("CudaGraphManager (V2).varlen_decode")
STRUCTURED_OUTPUTS = Swap("GPUModelRunner (V2).structured_outputs_worker")
GRAMMAR_CONFIG = Swap("StructuredOutputManager.vllm_config")
LAYER_IMPL = Swap("Attention.impl")
LAYER_CACHE = Swap("Attention.kv_cache")
ALLOCATE_KV_CACHE = Swap("vllm.v1.worker.gpu.attn_utils.allocate_kv_cache")
DRAFT_OVERRIDE = Swap("SpeculativeConfig.hf_config_override")
MROPE_CHECK = Swap("SpecDecodeBaseProposer._raise_if_mrope")
DRAFTER_LENGTH = Swap("GPUModelRunner (V1).effective_drafter_max_model_len")
DRAFT_PROBS = Swap("GPUModelRunner (V1)._get_spec_decode_draft_probs")
EXECUTE_MODEL = Swap("GPUModelRunner (V1).execute_model")
SAMPLE_TOKENS = Swap("GPUModelRunner (V1).sample_tokens")
SPECULATIVE_CONFIG = Swap("GPUModelRunner (V1).speculative_config")
ACTIVE_LORAS = Swap("GPUModelRunner (V1)._set_active_loras")
LORA_STATE = Swap("GPUModelRunner (V2).lora_state")
DUMMY_RUN_LORAS = Swap("GPUModelRunner (V2).maybe_dummy_run_with_lora")
LOGITS_PROCESSORS = Swap("InputBatch.logitsprocs")
METADATA_PROCESSORS = Swap("SamplingMetadata.logitsprocs")
THINKING_BUDGET = Swap("InputBatch.thinking_budget_state_holder")
METADATA_THINKING_BUDGET = Swap("SamplingMetadata.thinking_budget_state_holder")
REJECTION_SAMPLER = Swap("GPUModelRunner (V1).rejection_sampler")
REJECTION_SAMPLER_V2 = Swap("GPUModelRunner (V2).rejection_sampler")
REJECTION_SAMPLE = Swap("vllm.v1.sample.rejection_sampler.rejection_sample")
EXPAND_KERNEL = Swap("vllm.utils.cpu_triton_utils._expand_kernel_impl")
DISPATCHER_VARS = Swap("vllm.triton_utils.dispatcher.vars", is_new=True)
HAS_KV_TRANSFER_GROUP = Swap(
    "vllm.model_executor.layers.attention.kv_transfer_utils.has_kv_transfer_group"
)

SWAPS: dict[str, Swap] = {name: swap for name, swap in vars().items() if isinstance(swap, Swap)}
