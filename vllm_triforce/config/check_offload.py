"""What a KV cache in host memory cannot run beside, refused with the value, the reason and the
remedy."""

import psutil

from vllm_triforce.config.resolved import ResolvedConfig

_GIB = 1 << 30


def check_offload(vllm_config, config: ResolvedConfig) -> None:
    """
    Raises:
        ValueError: ``kv_offload_gib`` does not go with the engine's settings.
    """
    asked = f"kv_offload_gib={config.kv_offload_gib:g}"
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"{asked}: Model Runner V1 has the KV cache in one place; use a GPU, where V2 is "
            "vLLM's default, or leave it out"
        )
    _check_memory(asked, config)
    if vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        raise ValueError(
            f"{asked} with KV connector {connector!r}: the connector reads and writes KV on the "
            "device, where most of it is not; use one of the two"
        )
    if (size := vllm_config.cache_config.kv_offloading_size) is not None:
        raise ValueError(
            f"{asked} with kv_offloading_size={size:g}: that keeps the prefix cache's KV in host "
            "memory, where this one has it already; use one of the two"
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            f"{asked} with enable_sleep_mode=True: sleeping does not know of KV in host memory; "
            "use one of the two"
        )
    if (backend := getattr(vllm_config.attention_config.backend, "name", None)) == "FLASHINFER":
        raise ValueError(
            f"{asked} with --attention-backend {backend}: its plans are not told of staged layers "
            "yet; use FLASH_ATTN or TRITON_ATTN"
        )
    text_config = vllm_config.model_config.hf_text_config
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if len(kinds) > 1 or kinds & {"sliding_attention", "chunked_attention"}:
        raise ValueError(
            f"{asked}: target {vllm_config.model_config.model!r} has layers of the kinds "
            f"{', '.join(sorted(kinds))}, and one layer with full attention is staged for all; "
            "leave it out"
        )


def _check_memory(asked: str, config: ResolvedConfig) -> None:
    assert config.kv_offload_gib is not None
    total = psutil.virtual_memory().total / _GIB
    if config.kv_offload_gib > total:
        raise ValueError(
            f"{asked}: the machine has {total:.1f} GiB of memory; give less, for each rank"
        )
