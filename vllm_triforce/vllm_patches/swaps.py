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
_NO_HOOK = "the runner makes its own in `__init__` and has no hook"
_PLAIN_STEPS = (
    "a step without speculation takes stock vLLM's path, a batch without drafts skips the "
    "rejection sampler, and steps are timed for the controller"
)
_NOBODY_DRAFTS = "vLLM skips what drafting needs where nobody drafts"
_PARAMETERS = "`min_p`, `logit_bias` and `logprob_token_ids` beside drafts (Runner V1)"
_APPLIES_THEM = "vLLM's rejection sampler of Model Runner V1 applies them"
_THINKING_BUDGET = (
    "vLLM's holder of `thinking_token_budget` lays out its rows by whether speculation is "
    "configured: in a step without drafts it forces another request's token; see below"
)
_PLAIN_RULES = "vLLM forces the same tokens with speculation and without (Runner V2 does)"

DRAFTER = Swap("GPUModelRunner (V1)", "drafter", _NO_HOOK, _OUT_OF_TREE)
SPECULATOR = Swap("GPUModelRunner (V2)", "speculator", _NO_HOOK, _OUT_OF_TREE)
DRAFT_TOKENS_HANDLER = Swap(
    "GPUModelRunner (V2)",
    "draft_tokens_handler",
    "it hands on how many tokens of each request were proposed",
    _OUT_OF_TREE,
)
VARLEN_DECODE = Swap(
    "CudaGraphManager (V2)",
    "varlen_decode",
    "proposals are as long as was planned for each request: without graphs for any mix of lengths "
    "such a batch would run piecewise, where stock vLLM has one graph",
    "vLLM captures them wherever the attention allows it",
)
CUDAGRAPH_MANAGER = Swap(
    "GPUModelRunner (V2)",
    "cudagraph_manager",
    "a subclass of vLLM's, of the same state: graphs for plain decoding record no queries, and are "
    "not taken by a step behind which somebody selects",
    "never: part of the selection",
)
STRUCTURED_OUTPUTS = Swap(
    "GPUModelRunner (V2)",
    "structured_outputs_worker",
    "a subclass of vLLM's, of the same state: masks for `max_speculating_seqs` requests with "
    "drafts, where vLLM has them for `max_num_seqs`, 0.2 GiB with 1,024",
    "vLLM makes masks as they are needed",
)
GRAMMAR_CONFIG = Swap(
    "StructuredOutputManager",
    "vllm_config",
    "vLLM's configuration with the step's `num_speculative_tokens`: by it vLLM sizes the masks of "
    "grammars, and fills those of more than 128 requests in parallel only where it is 0",
    "vLLM sizes and fills them by the step's drafts",
)
GRAMMAR_MASKS = Swap(
    "StructuredOutputManager",
    "_grammar_bitmask",
    "None where a step has more drafts than it has room for: vLLM makes a larger one",
    "vLLM sizes and fills them by the step's drafts",
)
LAYER_IMPL = Swap(
    "Attention",
    "impl",
    "a subclass of vLLM's: level 2 reads fewer blocks, and level 3's queries are kept",
    "attention layers take a selection of blocks",
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
DRAFTER_LENGTH = Swap(
    "GPUModelRunner (V1)",
    "effective_drafter_max_model_len",
    "Runner V1 stops drafting for the whole batch once one request passes it; ours decides per "
    "request",
    "the check is per request upstream",
)
DRAFT_PROBS = Swap(
    "GPUModelRunner (V1)",
    "_get_spec_decode_draft_probs",
    "vLLM keeps the distributions of one step's drafts, for all requests or none: a request that "
    "has to wait a step costs the whole batch its own. Ours are kept by request, checked "
    "(`runner_v1/draft_probs.py`) and laid out for what is verified",
    "vLLM keeps them by request",
)
EXECUTE_MODEL = Swap("GPUModelRunner (V1)", "execute_model", _PLAIN_STEPS, _NOBODY_DRAFTS)
SAMPLE_TOKENS = Swap("GPUModelRunner (V1)", "sample_tokens", _PLAIN_STEPS, _NOBODY_DRAFTS)
SAMPLE = Swap("GPUModelRunner (V1)", "_sample", _PLAIN_STEPS, _NOBODY_DRAFTS)
SPECULATIVE_CONFIG = Swap(
    "GPUModelRunner (V1)",
    "speculative_config",
    "None during a step without speculation, which then takes stock vLLM's path",
    _NOBODY_DRAFTS,
)
ACTIVE_LORAS = Swap(
    "GPUModelRunner (V1)",
    "_set_active_loras",
    "level 2's passes need adapters of their own, then the full pass's again",
    "never: part of LoRA",
)
LORA_STATE = Swap(
    "GPUModelRunner (V2)",
    "lora_state",
    "a subclass of vLLM's, of the same state: the LoRA layer of `lm_head` is told of one row a "
    "request, and with drafts has more: their logits are computed with other requests' adapters "
    "or without, and on the CPU the engine ends. vLLM 0.32.0 and 0.33.0, whoever drafts",
    "vLLM counts each request's rows of logits, as it does on Runner V1",
)
DUMMY_RUN_LORAS = Swap(
    "GPUModelRunner (V2)",
    "maybe_dummy_run_with_lora",
    "while passes are measured at start-up: each dummy run makes its dummy adapters anew and loads "
    "them, which takes longer than the pass. They are there before",
    "vLLM's dummy runs take adapters that are there",
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
    "level 2's distributions are read by slot, and what was not proposed is tested as -1; "
    "`logprob_token_ids` beside drafts. A listener is added to `sampler.logits_processors` too: "
    "which requests have a grammar or name tokens is not kept by the runner",
    "vLLM's rejection sampler of Runner V2 returns them and is told where distributions lie; "
    "parameters reach the speculator",
)
TOP_K_TOP_P = Swap(
    "vllm.v1.sample (two modules)",
    "apply_top_k_top_p",
    "while tokens are sampled: on the CPU vLLM sorts the vocabulary for each token; the "
    "replacement (`runner_v1/top_p.py`) keeps the same tokens and leaves to vLLM the rows "
    "where rounding or ties decide",
    "vLLM's CPU path does not sort",
)
EXPAND_KERNEL = Swap(
    "vllm.utils.cpu_triton_utils",
    "_expand_kernel_impl",
    "replaced on the CPU if a self-check finds it wrong; see below. `vllm-triforce bench` does so "
    "for stock vLLM's own methods too, which sample wrongly without it",
    "the oldest supported vLLM writes its output back",
)
DISPATCHER_VARS = Swap(
    "vllm.triton_utils.dispatcher",
    "vars",
    "`runner_v1/top_p_rows.py` is compiled by numba, as vLLM's `ngram` is, and the benchmark "
    "has several engines in a process. Once numba is loaded, no other engine starts on the CPU: "
    "`_rebind_kernels` takes `vars(value)` of a module's value for a dict, and llvmlite's `lib` "
    "answers with a foreign function. vLLM 0.32.0 and 0.33.0",
    "vLLM checks for a dict",
    is_new=True,
)
HAS_KV_TRANSFER_GROUP = Swap(
    "vllm.model_executor.layers.attention.kv_transfer_utils",
    "has_kv_transfer_group",
    "during a pass of levels 1 and 2: the step's connector metadata is still bound while drafts "
    "are made, so a KV connector would load and save layers around passes that are none of its "
    "business",
    "a pass can say so",
)

SWAPS: dict[str, Swap] = {name: swap for name, swap in vars().items() if isinstance(swap, Swap)}
