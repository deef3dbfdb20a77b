"""Memory of a rank: weights, KV cache, and TriForce's buffers beside them."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_triforce.config import read_config
from vllm_triforce.config.level2 import DTYPES, online_schemes
from vllm_triforce_bench.doctor.layers import Layers, weight_bytes_of_copy
from vllm_triforce_bench.predict.steps import OTHER_BYTES


def memory(vllm_config, layers: Layers, copy_bytes: int) -> dict[str, Any]:
    """Compute the bytes of one rank, with weights and heads divided evenly over ranks.

    Args:
        copy_bytes: of level 2's copy of the whole target.
    """
    from vllm.platforms import current_platform

    from vllm_triforce.worker.memory import buffer_bytes, summary_bytes_per_kv_byte

    config, draft_model = read_config(vllm_config)
    retrieving = {name: _sharded(layer, layers.ranks) for name, layer in layers.retrieving.items()}
    fixed_bytes, share = 0, 0.0
    if not config.is_plain:
        drafts = _draft_layers(vllm_config) if draft_model else {}
        fixed_bytes = sum(buffer_bytes(retrieving, drafts, config, vllm_config).values())
        share = summary_bytes_per_kv_byte(retrieving, config, vllm_config)
    each = kv_bytes_each(vllm_config)
    sharded = (_sharded(layer, layers.ranks) for layer in layers.all.values())
    kv_bytes = sum(2 * layer.num_kv_heads * layer.head_size * each for layer in sharded)
    results = {
        "ranks": layers.ranks,
        "weight_bytes": layers.weight_bytes // layers.ranks,
        "level2_model_bytes": copy_bytes // layers.ranks,
        "kv_bytes_per_token": kv_bytes,
        "triforce_bytes": fixed_bytes,
        "triforce_share_of_kv": share,
    }
    if config.kv_offload_gib is not None:
        results["host_bytes"] = int(config.kv_offload_gib * 2**30)
    if not current_platform.is_cpu():
        device_bytes = current_platform.get_device_total_memory()
        free_bytes = device_bytes * vllm_config.cache_config.gpu_memory_utilization
        free_bytes -= results["weight_bytes"] + results["level2_model_bytes"]
        free_bytes -= OTHER_BYTES + fixed_bytes
        results["device_bytes"] = device_bytes
        results["device_kv_tokens"] = max(0, int(free_bytes / (kv_bytes * (1 + share))))
    return results


def level2_model_bytes(name: str | None, vllm_config, layers: Layers) -> int:
    """Compute the bytes of level 2's copy of the whole target; 0 without one.

    Args:
        name: value of ``level2_model``.

    Raises:
        NotBuilt: the copy is another checkpoint, and its code needs weights.
    """
    config = vllm_config.model_config
    if name is None:
        return 0
    if name in DTYPES:
        return layers.weight_bytes // config.dtype.itemsize * getattr(torch, name).itemsize
    if name in online_schemes(config):  # which leave the embedding and the output head
        text = config.hf_text_config
        num_ends = 1 if getattr(text, "tie_word_embeddings", False) else 2
        kept = num_ends * config.get_vocab_size() * text.hidden_size * config.dtype.itemsize
        bits = 4 if name.endswith("4") else 8
        return kept + (layers.weight_bytes - kept) * bits // (8 * config.dtype.itemsize)
    return weight_bytes_of_copy(name, vllm_config)


def _sharded(layer, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_heads=max(1, layer.num_heads // ranks),
        num_kv_heads=max(1, layer.num_kv_heads // ranks),
        head_size=layer.head_size,
    )


def _draft_layers(vllm_config) -> dict[str, SimpleNamespace]:
    """Read the draft's layers off its configuration; the draft is not built."""
    model = vllm_config.speculative_config.draft_model_config
    parallel = vllm_config.speculative_config.draft_parallel_config
    layer = SimpleNamespace(
        num_kv_heads=model.get_num_kv_heads(parallel), head_size=model.get_head_size()
    )
    return {f"draft.{index}": layer for index in range(model.get_num_layers(parallel))}


def kv_bytes_each(vllm_config) -> int:
    """Return the bytes of a number of the target's KV cache."""
    is_fp8 = "fp8" in vllm_config.cache_config.cache_dtype
    return 1 if is_fp8 else vllm_config.model_config.dtype.itemsize
