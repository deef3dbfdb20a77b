"""What TriForce would take of a rank's memory, beside vLLM's weights and KV cache."""

from types import SimpleNamespace
from typing import Any

from vllm_triforce.config.keys import METHOD
from vllm_triforce.config.resolved import ResolvedConfig
from vllm_triforce_bench.doctor.layers import Layers
from vllm_triforce_bench.predict.steps import OTHER_BYTES


def memory(vllm_config, layers: Layers) -> dict[str, Any]:
    """Bytes of one rank. Weights and layers are divided evenly, which they nearly are."""
    from vllm.platforms import current_platform

    from vllm_triforce.worker.memory import extra_memory

    keys = dict(vllm_config.additional_config[METHOD])
    draft = keys.pop("draft_model")
    config = ResolvedConfig.from_dict(keys)
    retrieving = {name: _of_rank(its, layers.ranks) for name, its in layers.retrieving.items()}
    fixed, share = 0, 0.0
    if not config.is_plain:
        drafts = _draft_layers(vllm_config) if draft else {}
        fixed, share = extra_memory(retrieving, drafts, config, vllm_config)
    each = _bytes_of_kv_number(vllm_config)
    kv = sum(
        2 * its.num_kv_heads * its.head_size * each
        for its in (_of_rank(layer, layers.ranks) for layer in layers.all)
    )
    found = {
        "ranks": layers.ranks,
        "weight_bytes": layers.weight_bytes // layers.ranks,
        "kv_bytes_per_token": kv,
        "triforce_bytes": fixed,
        "triforce_share_of_kv": share,
    }
    if config.kv_offload_gib is not None:
        found["host_bytes"] = int(config.kv_offload_gib * 2**30)
    if not current_platform.is_cpu():
        total = current_platform.get_device_total_memory()
        left = total * vllm_config.cache_config.gpu_memory_utilization
        left -= found["weight_bytes"] + OTHER_BYTES + fixed
        found["device_bytes"] = total
        found["device_kv_tokens"] = max(0, int(left / (kv * (1 + share))))
    return found


def _of_rank(layer, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_heads=max(1, layer.num_heads // ranks),
        num_kv_heads=max(1, layer.num_kv_heads // ranks),
        head_size=layer.head_size,
    )


def _draft_layers(vllm_config) -> dict[str, SimpleNamespace]:
    """From the draft's configuration: it is not built."""
    model = vllm_config.speculative_config.draft_model_config
    parallel = vllm_config.speculative_config.draft_parallel_config
    layer = SimpleNamespace(
        num_kv_heads=model.get_num_kv_heads(parallel), head_size=model.get_head_size()
    )
    return {f"draft.{index}": layer for index in range(model.get_num_layers(parallel))}


def _bytes_of_kv_number(vllm_config) -> int:
    is_fp8 = "fp8" in vllm_config.cache_config.cache_dtype
    return 1 if is_fp8 else vllm_config.model_config.dtype.itemsize
