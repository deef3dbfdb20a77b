"""What a KV cache in host memory cannot run beside, refused with the value, the reason and the
remedy."""

import psutil
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

from vllm_triforce.config.resolved import ResolvedConfig

_GIB = 1 << 30
# Of the machine's memory, for what else there is.
_MOST_SHARE = 0.9


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
    _check_memory(asked, config, vllm_config.parallel_config)
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
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            f"{asked} with microbatches (enable_dbo, ubatch_size): both would be staged in the "
            "same memory at the same time; leave one of them out"
        )
    fused = vllm_config.compilation_config.pass_config
    for name in ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"):
        if getattr(fused, name):
            raise ValueError(
                f"{asked} with pass_config.{name}=true: the fused kernel would write what level 2 "
                "computes into host memory; set it to false in --compilation-config"
            )
    if (backend := getattr(vllm_config.attention_config.backend, "name", None)) == "FLASHINFER":
        raise ValueError(
            f"{asked} with --attention-backend {backend}: its plans are not told of staged layers "
            "yet; use FLASH_ATTN or TRITON_ATTN"
        )
    text_config = vllm_config.model_config.hf_text_config
    if shared := getattr(text_config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{asked}: {shared} layers of target {vllm_config.model_config.model!r} read another "
            "layer's KV cache, and each layer is staged by itself; leave it out"
        )
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if len(kinds) > 1 or kinds & {"sliding_attention", "chunked_attention"}:
        raise ValueError(
            f"{asked}: target {vllm_config.model_config.model!r} has layers of the kinds "
            f"{', '.join(sorted(kinds))}, and one layer with full attention is staged for all; "
            "leave it out"
        )


def _check_memory(asked: str, config: ResolvedConfig, parallel) -> None:
    assert config.kv_offload_gib is not None
    ranks = max(1, parallel.tensor_parallel_size // parallel.nnodes)
    ranks *= max(1, parallel.data_parallel_size_local)
    limits = psutil.virtual_memory().total, get_cgroup_memory_limit()
    has = min(limit for limit in limits if limit is not None) / _GIB
    if config.kv_offload_gib * ranks > _MOST_SHARE * has:
        of_ranks = f" for each of {ranks} ranks here" if ranks > 1 else ""
        raise ValueError(
            f"{asked}{of_ranks}: the machine has {has:.1f} GiB of memory, or allows as much; give "
            f"{_MOST_SHARE * has / ranks:.1f} at most"
        )
