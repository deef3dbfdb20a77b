"""Checks of the target and the engine's settings before any weights load.

A refusal is a ``ValueError`` that names the setting, the reason and a remedy.
"""

import psutil
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

from vllm_triforce.config.budget import chunk_size
from vllm_triforce.config.draft_sources import SOURCES_V2
from vllm_triforce.config.level2 import has_recurrent_layers
from vllm_triforce.config.synthetic import SYNTHETIC
from vllm_triforce.config.triforce_config import ResolvedConfig, TriForceConfig
from vllm_triforce.selection import POLICIES

_GIB = 1 << 30
# Share of host memory that KV may take; the rest is for weights, buffers and other processes.
_MAX_HOST_SHARE = 0.9
# dtypes of KV caches whose keys level 2 reads on a GPU. fp8_e5m2 is missing: vLLM's own dtype for
# fp8 views is e4m3.
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")


def check_selection(config: TriForceConfig) -> None:
    """Refuse a selection policy of another package that does not load.

    This loads the policy, and torch. Policies that are not selected stay unloaded.
    """
    if config.is_plain:  # level 2 does not run
        return
    try:
        POLICIES[config.selection]
    except ValueError as error:
        raise ValueError(f"selection={config.selection!r}: {error}") from error


def check_rejection_sample_method(method, has_fixed_shapes: bool) -> None:
    """Refuse rejection sampling methods that are unknown or that the model runner lacks."""
    if method == "block" and not has_fixed_shapes:
        raise ValueError(
            "rejection_sample_method='block' is not supported with Model Runner V1: its rejection "
            "sampler tests tokens one by one. Leave it out."
        )
    if method not in ("standard", "block", SYNTHETIC):
        raise ValueError(
            f"rejection_sample_method={method!r} is not supported with method='triforce': only "
            "'standard' and 'block' keep the target's distribution, and 'synthetic' is for "
            "benchmarks. Use one of them."
        )


_ONE_RANK_REASONS = {
    "pipeline_parallel_size": "level 2 needs every layer of the target on one rank",
    "decode_context_parallel_size": "level 2 needs the whole KV cache of a request on one rank",
    "prefill_context_parallel_size": "level 2 needs the queries of whole requests on one rank",
}


def check_target(model_config, parallel_config) -> None:
    """Refuse targets that TriForce cannot speculate for.

    ``level2.py`` knows those for which only level 2 steps aside.
    """
    for name, reason in _ONE_RANK_REASONS.items():
        if (size := getattr(parallel_config, name)) > 1:
            raise ValueError(
                f"{name}={size} is not supported with method='triforce': {reason}. Use tensor "
                "parallelism instead."
            )
    target = f"target {model_config.model!r}"
    if model_config.runner_type != "generate":
        raise ValueError(
            f"{target} runs as {model_config.runner_type!r}, which generates no tokens to "
            "speculate on. Drop method='triforce'."
        )
    if model_config.is_encoder_decoder:
        raise ValueError(
            f"{target} is an encoder-decoder model, which TriForce does not support. Use a "
            "decoder-only model or another method."
        )
    if is_cpu() and (has_recurrent_layers(model_config) or model_config.use_mla):
        raise ValueError(
            f"{target} is not supported on the CPU: vLLM's CPU build computes wrong tokens there "
            "after a step with drafts, with linear-attention and state-space layers and with MLA. "
            "Use a GPU, or decode without speculation."
        )
    if model_config.is_attention_free:
        raise ValueError(
            f"{target} has no attention layer, which TriForce was not tried with. Use a model with "
            "attention in some layers, or another method."
        )
    if model_config.enable_prompt_embeds:
        raise ValueError(
            "enable_prompt_embeds=True is not supported with method='triforce': levels 1 and 2 "
            "read token ids, which prompt embeddings lack. Drop one of the two."
        )


def check_vllm_config(vllm_config, config: ResolvedConfig) -> None:
    """Refuse engine settings under which level 2's passes would be wrong or could hang."""
    from vllm.platforms import current_platform

    check_platform(current_platform)
    _check_runner(vllm_config, config)
    _check_features(vllm_config)
    if config.kv_offload_gib is not None:
        check_offload(vllm_config, config)
    _check_pass_size(vllm_config, config)
    if config.uses_level2:
        _check_kv_cache_dtype(vllm_config.cache_config)


def check_platform(platform) -> None:
    """Refuse a platform that ``attention/platforms.py`` has no attention for."""
    if not (platform.is_cpu() or platform.is_cuda_alike()):
        raise ValueError(
            f"TriForce has no sparse attention for platform {platform.device_name!r} yet; use vLLM "
            "on CUDA, ROCm or a CPU, or another speculative method"
        )


def _check_runner(vllm_config, config: ResolvedConfig) -> None:
    """Check the model runner and the settings that it supports."""
    if vllm_config.use_v2_model_runner:
        for name in config.sources:
            if name not in SOURCES_V2:
                raise ValueError(
                    f"draft_sources={config.draft_sources!r} is not supported with Model Runner "
                    f"V2: {name!r} drafts on the host. Use one of {SOURCES_V2.names}."
                )
    elif not is_cpu():
        raise ValueError(
            "use_v2_model_runner=False is not supported on a GPU: TriForce runs there on Model "
            "Runner V2 only. Unset VLLM_USE_V2_MODEL_RUNNER, or use another method if the model "
            "needs V1."
        )
    else:
        _check_logits_processors(vllm_config.model_config)


def _check_features(vllm_config) -> None:
    """Check vLLM's features that levels 1 and 2 do not take part in."""
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            "enable_sleep_mode=True is not supported with TriForce: its buffers lie outside the "
            "memory that vLLM gives back, and nothing reloads the draft. Leave it out, or use "
            "another method."
        )
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        raise ValueError(
            f"data_parallel_size={parallel.data_parallel_size} with a mixture-of-experts target "
            "is not supported: its ranks step together, and level 2's rounds differ by rank. Use "
            "tensor parallelism."
        )
    if vllm_config.structured_outputs_config.backend == "lm-format-enforcer":
        raise ValueError(
            "structured_outputs_config.backend='lm-format-enforcer' is not supported with "
            "method='triforce': vLLM compiles its grammars only without speculation. Use "
            "'auto', 'xgrammar', 'guidance' or 'outlines'."
        )


def _check_pass_size(vllm_config, config: ResolvedConfig) -> None:
    """Refuse a token budget smaller than level 2's largest pass, where vLLM has buffers for it.

    Its LoRA layers have one slot per token of ``max_num_batched_tokens``; so have M-RoPE positions
    and the embeddings of each layer (Gemma 3n, Gemma 4).
    """
    scheduler_config, model_config = vllm_config.scheduler_config, vllm_config.model_config
    if vllm_config.lora_config is not None:
        reason = "enable_lora=True"
    elif config.uses_level2 and (
        model_config.supports_multimodal_inputs or model_config.uses_mrope
    ):
        reason = f"target {model_config.model!r}, which takes images or has M-RoPE,"
    else:
        return
    num_reqs = min(scheduler_config.max_num_seqs, config.max_speculating_seqs)
    num_tokens = num_reqs * (config.gamma + 1)
    max_tokens = scheduler_config.max_num_batched_tokens
    if num_tokens > max_tokens:
        raise ValueError(
            f"max_num_batched_tokens={max_tokens} with {reason} is not supported: level 2's pass "
            f"of {num_reqs} requests has {num_tokens} tokens, more than vLLM's buffers hold. Raise "
            f"--max-num-batched-tokens, or lower max_speculating_seqs={config.max_speculating_seqs}"
            "."
        )


def _check_logits_processors(model_config) -> None:
    """Refuse custom logits processors on Model Runner V1.

    vLLM refuses given ones only after loading the model, and silently drops installed ones.
    """
    from importlib.metadata import entry_points

    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    installed = [entry.name for entry in entry_points(group=LOGITSPROCS_GROUP)]
    if names := list(model_config.logits_processors or []) + installed:
        raise ValueError(
            f"logits_processors={names} is not supported with Model Runner V1: vLLM does not apply "
            "custom logits processors to draft tokens. Drop or uninstall them, or drop "
            "method='triforce'."
        )


def _check_kv_cache_dtype(cache_config) -> None:
    """Refuse KV caches whose keys retrieval cannot read."""
    cache_dtype = cache_config.cache_dtype
    if cache_dtype not in KV_CACHE_DTYPES and not (cache_dtype == "fp8_e5m2" and is_cpu()):
        raise ValueError(
            f"kv_cache_dtype={cache_dtype!r} is not supported on this platform: retrieval does not "
            "read such quantized keys. Use kv_cache_dtype='auto'."
        )
    if cache_dtype.startswith("fp8") and not _reads_fp8():
        raise ValueError(
            f"kv_cache_dtype={cache_dtype!r} is not supported on this GPU: retrieval reads keys "
            "in fp8, which needs compute capability 8.9. Use kv_cache_dtype='auto'."
        )
    if skipped := cache_config.kv_cache_dtype_skip_layers:
        raise ValueError(
            f"kv_cache_dtype_skip_layers={skipped} is not supported with method='triforce': level "
            "2 needs one KV cache dtype in all layers that it makes sparse. Leave it out."
        )


def _reads_fp8() -> bool:
    """True if the platform computes with fp8."""
    from vllm.platforms import current_platform

    return not current_platform.is_cuda() or current_platform.has_device_capability(89)


def check_offload(vllm_config, config: ResolvedConfig) -> None:
    """Refuse engine settings that do not work with the KV cache in host memory."""
    setting = f"kv_offload_gib={config.kv_offload_gib:g}"
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"{setting} is not supported with Model Runner V1: it keeps the KV cache in one place. "
            "Use a GPU, where V2 is vLLM's default, or leave it out."
        )
    _check_host_memory(setting, config, vllm_config.parallel_config)
    if vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        raise ValueError(
            f"{setting} is not supported with KV connector {connector!r}: the connector reads and "
            "writes KV on the device, and most of it is in host memory. Use one of the two."
        )
    if (size := vllm_config.cache_config.kv_offloading_size) is not None:
        raise ValueError(
            f"{setting} is not supported with kv_offloading_size={size:g}: that keeps KV of the "
            "prefix cache in host memory, where it already is. Use one of the two."
        )
    block_size = vllm_config.cache_config.block_size
    if config.uses_level2 and chunk_size(block_size) != block_size:
        raise ValueError(
            f"{setting} is not supported with --block-size {block_size}: level 2 splits such "
            "blocks into chunks, and its pool holds whole blocks. Use 128 at most."
        )
    pass_config = vllm_config.compilation_config.pass_config
    for name in ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"):
        if getattr(pass_config, name):
            raise ValueError(
                f"{setting} is not supported with pass_config.{name}=true: the fused kernel would "
                "write level 2's KV into host memory. Set it to false in --compilation-config."
            )
    if (backend := getattr(vllm_config.attention_config.backend, "name", None)) == "FLASHINFER":
        raise ValueError(
            f"{setting} is not supported with --attention-backend {backend}: its plans do not "
            "cover staged layers yet. Use FLASH_ATTN or TRITON_ATTN."
        )
    target = vllm_config.model_config.model
    text_config = vllm_config.model_config.hf_text_config
    if shared := getattr(text_config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{setting} is not supported here: {shared} layers of target {target!r} read another "
            "layer's KV cache, and each layer is staged separately. Leave it out."
        )
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if len(layer_types) > 1 or layer_types & {"sliding_attention", "chunked_attention"}:
        raise ValueError(
            f"{setting} is not supported here: target {target!r} has layers of the kinds "
            f"{', '.join(sorted(layer_types))}, and staging needs full attention in every layer. "
            "Leave it out."
        )


def _check_host_memory(setting: str, config: ResolvedConfig, parallel) -> None:
    """Refuse sizes beyond the host memory of this machine or its cgroup."""
    assert config.kv_offload_gib is not None
    num_ranks = max(1, parallel.tensor_parallel_size // parallel.nnodes)
    num_ranks *= max(1, parallel.data_parallel_size_local)
    limits = psutil.virtual_memory().total, get_cgroup_memory_limit()
    host_gib = min(limit for limit in limits if limit is not None) / _GIB
    if config.kv_offload_gib * num_ranks > _MAX_HOST_SHARE * host_gib:
        per_rank = f" for each of {num_ranks} ranks here" if num_ranks > 1 else ""
        raise ValueError(
            f"{setting}{per_rank}: the machine has {host_gib:.1f} GiB of memory, or allows as "
            f"much. Use {_MAX_HOST_SHARE * host_gib / num_ranks:.1f} at most."
        )


def has_fixed_shapes() -> bool:
    """True if the engine uses Model Runner V2, whose passes have fixed shapes (CUDA graphs)."""
    from vllm import envs

    return not is_cpu() or bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def is_cpu() -> bool:
    """True if vLLM's platform is the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
