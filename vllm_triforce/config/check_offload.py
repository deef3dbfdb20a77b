"""Checks of ``kv_offload_gib`` against the engine's other settings."""

import psutil
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

from vllm_triforce.config.triforce_config import ResolvedConfig

_GIB = 1 << 30
# Share of host memory that KV may take; the rest is for weights, buffers and other processes.
_MAX_HOST_SHARE = 0.9


def check_offload(vllm_config, config: ResolvedConfig) -> None:
    """Refuse engine settings that do not work with the KV cache in host memory.

    Raises:
        ValueError: a setting conflicts with ``kv_offload_gib``, or it exceeds host memory.
    """
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
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            f"{setting} is not supported with microbatches (enable_dbo, ubatch_size): both would "
            "use the staging buffer at the same time. Leave one of them out."
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
