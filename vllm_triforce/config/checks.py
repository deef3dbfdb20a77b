"""What TriForce cannot run on, refused with the value, the reason and the remedy."""

from vllm_triforce.config.check_draft import has_alibi, has_sinks
from vllm_triforce.config.check_offload import check_offload
from vllm_triforce.config.draft_sources import SOURCES_V2
from vllm_triforce.config.keys import TriForceConfig
from vllm_triforce.config.resolved import ResolvedConfig
from vllm_triforce.config.supported import SUPPORTED_VLLM, is_supported
from vllm_triforce.selection import POLICIES


def check_vllm_version(version: str | None = None) -> None:
    if version is None:
        import vllm

        version = vllm.__version__
    if not is_supported(version):
        raise ValueError(
            f"vLLM {version} is not supported: TriForce leans on internals that it knows in "
            f"{', '.join(SUPPORTED_VLLM)}; install such a version, or drop method='triforce'"
        )


def check_selection(config: TriForceConfig) -> None:
    """Refuses a policy of another package that is known by its name and does not load, or is none.

    That loads it, and torch; what is not asked for is not loaded, and may be broken.
    """
    if config.is_plain:  # nothing is retrieved
        return
    try:
        POLICIES[config.selection]
    except ValueError as error:
        raise ValueError(f"selection={config.selection!r}: {error}") from error


def check_rejection_sample_method(method, has_fixed_shapes: bool) -> None:
    """Refuses tests of level 3 that bend the output, or that the model runner does not have."""
    if method == "block" and not has_fixed_shapes:
        raise ValueError(
            "rejection_sample_method='block' is not supported with Model Runner V1: its rejection "
            "sampler tests tokens one by one. Leave it out."
        )
    if method not in ("standard", "block"):
        raise ValueError(
            f"rejection_sample_method={method!r} is not supported with method='triforce': only "
            "'standard' and 'block' keep the target's distribution. Use one of them."
        )


def check_target(model_config, parallel_config) -> None:
    """Refuses targets whose attention TriForce cannot make sparse."""
    name = model_config.model
    if parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={parallel_config.pipeline_parallel_size}: level 2 needs every "
            "layer of the target on one rank; use tensor parallelism instead"
        )
    if parallel_config.decode_context_parallel_size > 1:
        raise ValueError(
            f"decode_context_parallel_size={parallel_config.decode_context_parallel_size}: level 2 "
            "retrieves from a KV cache that is whole on each rank; use tensor parallelism instead"
        )
    if parallel_config.prefill_context_parallel_size > 1:
        raise ValueError(
            f"prefill_context_parallel_size={parallel_config.prefill_context_parallel_size}: level "
            "2 needs the queries of whole requests on each rank; use tensor parallelism instead"
        )
    if model_config.runner_type != "generate":
        raise ValueError(
            f"target {name!r} runs as {model_config.runner_type!r}: there is nothing to speculate "
            "on; drop method='triforce'"
        )
    if model_config.is_encoder_decoder:
        raise ValueError(
            f"target {name!r} is an encoder-decoder model, which TriForce does not support; "
            "use a decoder-only model or another method"
        )
    if model_config.is_attention_free or model_config.is_hybrid or model_config.has_inner_state:
        raise ValueError(
            f"target {name!r} has state-space or linear-attention layers: they keep no KV cache "
            "to retrieve from; use a model with attention only, or another method"
        )
    if has_alibi(model_config):
        raise ValueError(
            f"target {name!r} has ALiBi in every layer: such layers stay dense, and level 2 has "
            "none to retrieve from; use a model with rotary positions, or another method"
        )
    if model_config.enable_prompt_embeds:
        raise ValueError(
            "enable_prompt_embeds=True: levels 1 and 2 read token ids, which prompts of embeddings "
            "do not have; drop --enable-prompt-embeds or method='triforce'"
        )
    if model_config.supports_multimodal_inputs:
        raise ValueError(
            f"target {name!r} takes images, audio or video, and vLLM feeds it embeddings: level 2 "
            "feeds token ids so far; use --language-model-only where it is asked about text alone, "
            "or another method"
        )
    if model_config.use_mla:
        raise ValueError(
            f"target {name!r} uses multi-head latent attention (MLA): its cache holds no keys per "
            "head to select by; use a model with MHA or GQA, or another method"
        )


def check_vllm_config(vllm_config, config: ResolvedConfig) -> None:
    """Refuses engine settings under which level 2's passes would be wrong or could hang."""
    parallel = vllm_config.parallel_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    if vllm_config.use_v2_model_runner:
        for name in config.sources:
            if name not in SOURCES_V2:
                raise ValueError(
                    f"draft_sources={config.draft_sources!r}: {name!r} drafts on the host, Model "
                    f"Runner V2 on the device; use one of {SOURCES_V2.names}"
                )
    if not is_cpu() and not vllm_config.use_v2_model_runner:
        raise ValueError(
            "use_v2_model_runner=False: on a GPU TriForce runs on Model Runner V2 only; unset "
            "VLLM_USE_V2_MODEL_RUNNER, or, where this model needs V1, use another method"
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            "enable_sleep_mode=True is not supported with TriForce: its buffers lie outside the "
            "memory that vLLM gives back, and nothing reloads the draft. Leave it out, or use "
            "another method."
        )
    if config.kv_offload_gib is not None:
        check_offload(vllm_config, config)
    if vllm_config.lora_config is not None:
        _check_room_for_adapters(vllm_config.scheduler_config, config)
    if cache_dtype not in ("auto", "float16", "bfloat16", "float32", *_readable_kv_cache_dtypes()):
        raise ValueError(
            f"kv_cache_dtype={cache_dtype!r}: retrieval does not read such quantized keys on this "
            "platform; use kv_cache_dtype='auto'"
        )
    if cache_dtype.startswith("fp8") and not _reads_fp8():
        raise ValueError(
            f"kv_cache_dtype={cache_dtype!r}: this GPU has no such numbers (compute capability "
            "8.9 is needed), and retrieval reads keys with them; use kv_cache_dtype='auto'"
        )
    if (window := vllm_config.cache_config.sliding_window) is not None:  # vLLM's, if it is of all
        raise ValueError(
            f"target {vllm_config.model_config.model!r} has a sliding window of {window} tokens in "
            "every layer: none reads more, which level 2 could retrieve from; use a model that has "
            "full attention in some layers, or another method"
        )
    if not is_cpu() and has_sinks(vllm_config.model_config):
        raise ValueError(
            f"target {vllm_config.model_config.model!r} has attention sinks in every layer, which "
            "level 2 does not read on a GPU yet; use another method"
        )
    if skipped := vllm_config.cache_config.kv_cache_dtype_skip_layers:
        raise ValueError(
            f"kv_cache_dtype_skip_layers={skipped}: level 2 needs one kind of KV cache in all of "
            "the layers that it makes sparse; leave it out"
        )
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        raise ValueError(
            f"data_parallel_size={parallel.data_parallel_size} with a mixture-of-experts target: "
            "its ranks step together, and level 2's rounds differ by rank; use tensor parallelism"
        )
    if not vllm_config.use_v2_model_runner:
        _check_logits_processors(vllm_config.model_config)
    if vllm_config.structured_outputs_config.backend == "lm-format-enforcer":
        raise ValueError(
            "structured_outputs_config.backend='lm-format-enforcer' is not supported with "
            "method='triforce': vLLM compiles its grammars only without speculation. Use "
            "'auto', 'xgrammar', 'guidance' or 'outlines'"
        )
    if vllm_config.watermark_config is not None:
        raise ValueError(
            "watermark_config: level 2 draws its tokens without the watermark; drop it or "
            "method='triforce'"
        )
    if vllm_config.model_config.uses_mrope:
        raise ValueError(
            f"target {vllm_config.model_config.model!r} uses M-RoPE, whose positions level 2 does "
            "not compute yet; use a text model or another method"
        )


def _check_room_for_adapters(scheduler_config, config: ResolvedConfig) -> None:
    """vLLM's LoRA layers have a place for each token of a step, and level 2's passes use them."""
    rows = min(scheduler_config.max_num_seqs, config.max_speculating_seqs)
    num_tokens, most = rows * (config.gamma + 1), scheduler_config.max_num_batched_tokens
    if num_tokens > most:
        raise ValueError(
            f"max_num_batched_tokens={most} with enable_lora=True: level 2's pass of {rows} "
            f"requests has {num_tokens} tokens, and vLLM's adapters have room for a step's; raise "
            "--max-num-batched-tokens or lower max_speculating_seqs="
            f"{config.max_speculating_seqs}"
        )


def _check_logits_processors(model_config) -> None:
    """Model Runner V1 refuses these once a model is loaded, and silently drops installed ones."""
    from importlib.metadata import entry_points

    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    installed = [entry.name for entry in entry_points(group=LOGITSPROCS_GROUP)]
    if given := list(model_config.logits_processors or []) + installed:
        raise ValueError(
            f"logits_processors={given}: vLLM does not apply custom logits processors to tokens "
            "that were speculated; drop or uninstall them, or drop method='triforce'"
        )


def _readable_kv_cache_dtypes() -> tuple[str, ...]:
    fp8 = ("fp8", "fp8_e4m3")
    return (*fp8, "fp8_e5m2") if is_cpu() else fp8


def _reads_fp8() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cuda() or current_platform.has_device_capability(89)


def has_fixed_shapes() -> bool:
    """Whether the model runner will be V2, whose passes have fixed shapes (CUDA graphs)."""
    from vllm import envs

    return not is_cpu() or bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
