"""Attributes that TriForce sets on vLLM's objects, in engines that run TriForce.

The ledger (patches/README.md) is generated from this list, and a test forbids other such writes.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Swap:
    """Attribute of a vLLM object that TriForce replaces (``patch.py`` wraps attributes of classes).

    Args:
        owner: name of the object's class or module, for the ledger.
        attribute: name of the attribute.
        why: reason, for the ledger.
        until: condition under which the swap can be deleted, for the ledger.
        is_new: True if vLLM's object lacks the attribute.
    """

    owner: str
    attribute: str
    why: str
    until: str
    is_new: bool = False

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.attribute}"

    def set(self, owner: Any, value: Any) -> Any:
        """Set the attribute on ``owner`` and return the previous value, or None.

        Raises:
            AttributeError: this vLLM's object lacks the attribute, so nothing would read it.
        """
        if not self.is_new and not hasattr(owner, self.attribute):
            raise AttributeError(
                f"vllm-triforce sets {self.attribute!r}, which this vLLM's "
                f"{type(owner).__name__} does not have. Install a supported vLLM, or drop "
                "method='triforce'."
            )
        before = getattr(owner, self.attribute, None)
        setattr(owner, self.attribute, value)
        return before


_OUT_OF_TREE = "an out-of-tree speculator can be named"
_NO_HOOK = "the runner creates its own in `__init__`, without a hook"
_PLAIN_STEPS = (
    "a step without speculation takes stock vLLM's path, a batch without drafts skips the "
    "rejection sampler, and steps are timed for the controller"
)
_NO_DRAFTS = "vLLM skips the work for drafts in steps without any"
_PARAMETERS = "`min_p`, `logit_bias` and `logprob_token_ids` with drafts (Runner V1)"
_APPLIES_THEM = "vLLM's rejection sampler of Model Runner V1 applies them"
_BY_STEP = "vLLM sizes and fills masks by the step's drafts"
_THINKING_BUDGET = (
    "with speculation configured, vLLM forces another request's token for `thinking_token_budget` "
    "in a step without drafts; see below"
)
_PLAIN_RULES = "vLLM forces the same tokens with speculation and without (Runner V2 does)"

DRAFTER = Swap("GPUModelRunner (V1)", "drafter", _NO_HOOK, _OUT_OF_TREE)
SPECULATOR = Swap("GPUModelRunner (V2)", "speculator", _NO_HOOK, _OUT_OF_TREE)
AUX_STATES = Swap(
    "GPUModelRunner",
    "use_aux_hidden_state_outputs",
    "an EAGLE-3 head reads the target's hidden states, as with vLLM's `method=eagle3`",
    _OUT_OF_TREE,
)
_LAYERS_ONCE = "vLLM's runners and heads read the layers of a head's states from different keys"
_ONE_READER = "they read one key"
HEAD_LAYERS = Swap(
    "hf_config of an EAGLE-3 head",
    "eagle_aux_hidden_state_layer_ids",
    _LAYERS_ONCE,
    _ONE_READER,
    is_new=True,
)
NUM_HEAD_LAYERS = Swap(
    "hf_config of an EAGLE-3 head", "num_aux_hidden_states", _LAYERS_ONCE, _ONE_READER, is_new=True
)
DRAFT_TOKENS_HANDLER = Swap(
    "GPUModelRunner (V2)",
    "draft_tokens_handler",
    "passes on the number of tokens that each request proposed",
    _OUT_OF_TREE,
)
VARLEN_DECODE = Swap(
    "CudaGraphManager (V2)",
    "varlen_decode",
    "plans give requests proposals of different lengths: without graphs for mixed lengths such a "
    "batch would run piecewise, where stock vLLM has one graph",
    "vLLM captures them wherever the attention allows it",
)
CUDAGRAPH_MANAGER = Swap(
    "GPUModelRunner (V2)",
    "cudagraph_manager",
    "a subclass of vLLM's with the same state: graphs for plain decoding record no queries, so "
    "steps before a selection do not use them",
    "never: part of the selection",
)
STRUCTURED_OUTPUTS = Swap(
    "GPUModelRunner (V2)",
    "structured_outputs_worker",
    "a subclass of vLLM's with the same state: masks of drafts for `max_speculating_seqs` "
    "requests, where vLLM allocates them for `max_num_seqs` (0.2 GiB with 1,024)",
    "vLLM allocates masks when a step needs them",
)
GRAMMAR_CONFIG = Swap(
    "StructuredOutputManager",
    "vllm_config",
    "vLLM's configuration with the step's `num_speculative_tokens`: vLLM sizes the masks of "
    "grammars by it, and fills those of more than 128 requests in parallel only if it is 0",
    _BY_STEP,
)
GRAMMAR_MASKS = Swap(
    "StructuredOutputManager",
    "_grammar_bitmask",
    "None if a step has more drafts than the masks have rows: vLLM then allocates larger ones",
    _BY_STEP,
)
LAYER_IMPL = Swap(
    "Attention",
    "impl",
    "a subclass of vLLM's: level 2 reads fewer blocks, and level 3's queries are recorded",
    "attention layers accept a selection of blocks",
)
LAYER_CACHE = Swap(
    "Attention",
    "kv_cache",
    "the draft's layers have a private cache, level 1's windows",
    _OUT_OF_TREE,
)
ALLOCATE_KV_CACHE = Swap(
    "vllm.v1.worker.gpu.attn_utils",
    "allocate_kv_cache",
    "with `kv_offload_gib` the last layers' KV cache lies in host memory; set while vLLM allocates",
    "vLLM can place a layer's KV cache",
)
DRAFT_OVERRIDE = Swap(
    "SpeculativeConfig",
    "hf_config_override",
    "without a draft model the target's name stands in the draft's place, and vLLM would take it "
    "for the target's MTP layers, whose number limits lengths; set while the config is made",
    _OUT_OF_TREE,
)
MROPE_CHECK = Swap(
    "SpecDecodeBaseProposer",
    "_raise_if_mrope",
    "the drafter that Runner V1 makes before ours refuses draft models with M-RoPE, and takes the "
    "target for one if there is none; set while the runner is made",
    _OUT_OF_TREE,
)
DRAFTER_LENGTH = Swap(
    "GPUModelRunner (V1)",
    "effective_drafter_max_model_len",
    "Runner V1 stops drafting for the whole batch when one request exceeds it; TriForce checks "
    "each request",
    "vLLM checks each request",
)
DRAFT_PROBS = Swap(
    "GPUModelRunner (V1)",
    "_get_spec_decode_draft_probs",
    "vLLM keeps the distributions of one step's drafts, for all requests or none, so one request "
    "that waits a step loses those of the whole batch. Ours are kept by request, checked "
    "(`runner_v1/draft_probs.py`), and ordered by the tokens to verify",
    "vLLM keeps them by request",
)
EXECUTE_MODEL = Swap("GPUModelRunner (V1)", "execute_model", _PLAIN_STEPS, _NO_DRAFTS)
SAMPLE_TOKENS = Swap("GPUModelRunner (V1)", "sample_tokens", _PLAIN_STEPS, _NO_DRAFTS)
SAMPLE = Swap("GPUModelRunner (V1)", "_sample", _PLAIN_STEPS, _NO_DRAFTS)
SPECULATIVE_CONFIG = Swap(
    "GPUModelRunner (V1)",
    "speculative_config",
    "None during a step without speculation, which then takes stock vLLM's path",
    _NO_DRAFTS,
)
ACTIVE_LORAS = Swap(
    "GPUModelRunner (V1)",
    "_set_active_loras",
    "level 2's passes set the adapters of their own tokens, then restore the full pass's",
    "never: part of LoRA",
)
LORA_STATE = Swap(
    "GPUModelRunner (V2)",
    "lora_state",
    "a subclass of vLLM's with the same state: vLLM gives the LoRA layer of `lm_head` one row per "
    "request, and drafts add rows. Their logits are computed with other requests' adapters or "
    "without, and on the CPU the engine stops. vLLM 0.32.0 and 0.33.0, any speculative method",
    "vLLM counts each request's rows of logits, as it does on Runner V1",
)
DUMMY_RUN_LORAS = Swap(
    "GPUModelRunner (V2)",
    "maybe_dummy_run_with_lora",
    "while passes are measured at start-up: each dummy run creates and loads dummy adapters, which "
    "takes longer than the pass. The measurement creates them once",
    "vLLM's dummy runs reuse adapters",
)
LOGITS_PROCESSORS = Swap("InputBatch", "logitsprocs", _PARAMETERS, _APPLIES_THEM)
METADATA_PROCESSORS = Swap("SamplingMetadata", "logitsprocs", _PARAMETERS, _APPLIES_THEM)
THINKING_BUDGET = Swap("InputBatch", "thinking_budget_state_holder", _THINKING_BUDGET, _PLAIN_RULES)
METADATA_THINKING_BUDGET = Swap(
    "SamplingMetadata", "thinking_budget_state_holder", _THINKING_BUDGET, _PLAIN_RULES
)
REJECTION_SAMPLER = Swap("GPUModelRunner (V1)", "rejection_sampler", _PARAMETERS, _APPLIES_THEM)
REJECTION_SAMPLER_V2 = Swap(
    "GPUModelRunner (V2)",
    "rejection_sampler",
    "reads level 2's distributions by slot, tests padding as -1, and supports `logprob_token_ids` "
    "with drafts. A listener is also added to `sampler.logits_processors`, since the runner does "
    "not record which requests have a grammar or name tokens",
    "vLLM's rejection sampler of Runner V2 returns them and accepts an index of distributions; "
    "parameters reach the speculator",
)
REJECTION_SAMPLE = Swap(
    "vllm.v1.sample.rejection_sampler",
    "rejection_sample",
    "while tokens are sampled: the controller learns from the probability of each draft token's "
    "acceptance (`runner_v1/acceptance.py`). Calls vLLM's function",
    "vLLM's rejection sampler reports the probabilities",
)
EXPAND_KERNEL = Swap(
    "vllm.utils.cpu_triton_utils",
    "_expand_kernel_impl",
    "replaced on the CPU if a self-check finds it wrong; see below. `vllm-triforce bench` also "
    "does so for stock vLLM's own methods, which sample wrongly without it",
    "the oldest supported vLLM writes its output back",
)
DISPATCHER_VARS = Swap(
    "vllm.triton_utils.dispatcher",
    "vars",
    "after numba is loaded, no other engine starts on the CPU in the same process: "
    "`_rebind_kernels` expects a dict of `vars(value)` for each value of a module, and llvmlite's "
    "`lib` returns a foreign function. vLLM 0.32.0 and 0.33.0. numba compiles vLLM's "
    "`ngram`, and the benchmark has several engines",
    "vLLM checks for a dict",
    is_new=True,
)
HAS_KV_TRANSFER_GROUP = Swap(
    "vllm.model_executor.layers.attention.kv_transfer_utils",
    "has_kv_transfer_group",
    "False during a pass of levels 1 and 2: the step's connector metadata is still bound, so a KV "
    "connector would load and save layers for these passes too",
    "a pass can opt out of the connector",
)

SWAPS: dict[str, Swap] = {name: swap for name, swap in vars().items() if isinstance(swap, Swap)}
