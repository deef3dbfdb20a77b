"""Memory that TriForce needs on a GPU besides vLLM's KV cache."""

import math
from collections.abc import Mapping
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_triforce.cache.summaries import SCALE_BYTES, num_vote_numbers, rows_scored_together
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.kv_groups import own_states
from vllm_triforce.runner_v2.graph_sizes import MAX_ROWS
from vllm_triforce.selection import POLICIES

# Float32 copies of level 2's logits that a proposal with top-k or top-p makes.
_LOGIT_COPIES = 4


def buffer_bytes(
    layers: dict,
    draft_layers: dict,
    config: ResolvedConfig,
    vllm_config,
    recurrent: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Return the bytes of buffers whose size does not depend on the KV cache, by purpose.

    All are sized for ``max_speculating_seqs`` requests. CUDA's own memory of graphs is not included
    (``RunnerAdapterV2.graph_bytes``).
    """
    scheduler = vllm_config.scheduler_config
    seqs = min(scheduler.max_num_seqs, config.max_speculating_seqs)
    _, cache_itemsize = _itemsizes(vllm_config)
    vocab_size = vllm_config.model_config.get_vocab_size()
    logits_bytes = seqs * vocab_size * vllm_config.model_config.head_dtype.itemsize
    window_blocks = -(-config.window_tokens // config.block_size)
    window_bytes_per_number = 2 * seqs * window_blocks * config.block_size * cache_itemsize
    state_bytes = 0
    if config.has_head:  # whose inputs are hidden states
        draft_config = vllm_config.speculative_config.draft_model_config
        # Runner V2 has one more slot, for states that are dropped.
        num_states = (seqs + vllm_config.use_v2_model_runner) * config.state_capacity
        state_bytes = num_states * draft_config.get_hidden_size() * draft_config.dtype.itemsize
    window_numbers = sum(layer.num_kv_heads * layer.head_size for layer in draft_layers.values())
    bytes_by_purpose = {
        "proposals' distributions": logits_bytes * config.num_speculative_tokens,
        **_selection_bytes(layers, config, vllm_config),
        "the draft's windows": window_bytes_per_number * window_numbers,
        "the draft's distributions": logits_bytes * config.gamma if draft_layers else 0,
        "the head's states": state_bytes,
    }
    if recurrent and config.uses_level2:
        bytes_by_purpose["level 2's recurrent states"] = sum(
            (1 + count * seqs) * math.prod(shape) * dtype.itemsize
            for layer in recurrent.values()
            for count, shape, dtype in own_states(layer, config.gamma + 1)
        )
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        bytes_by_purpose["graphs' logits"] = _logits(config, vllm_config, min(seqs, MAX_ROWS))
    return bytes_by_purpose


def _selection_bytes(layers: dict, config: ResolvedConfig, vllm_config) -> dict[str, int]:
    """Return the bytes of what level 2 selects by and keeps selected, by purpose."""
    if not config.uses_level2:
        return {}
    first = next(iter(layers.values()))
    num_layers, num_kv_heads, num_heads = len(layers), first.num_kv_heads, first.num_heads
    seqs = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
    max_blocks = -(-vllm_config.model_config.max_model_len // config.block_size)
    if config.has_selection_kernels:
        pass_bytes = 4 * seqs * num_vote_numbers(max_blocks, num_heads, num_kv_heads)
    else:  # in graphs
        numbers = len(POLICIES[config.policy].summaries) * first.head_size
        sizes = seqs, max_blocks, num_heads, num_kv_heads, numbers
        _, pass_bytes = rows_scored_together(*sizes)
    return {
        "selections": 4 * seqs * num_layers * num_kv_heads * config.table_width,
        "votes": pass_bytes,
    }


def _itemsizes(vllm_config) -> tuple[int, int]:
    """Return the bytes of a number in the model's dtype and in the KV cache."""
    itemsize = vllm_config.model_config.dtype.itemsize
    return itemsize, 1 if "fp8" in vllm_config.cache_config.cache_dtype else itemsize


def _logits(config: ResolvedConfig, vllm_config, num_rows: int) -> int:
    """Return the bytes of level 2's logits and their copies."""
    vocab_size = vllm_config.model_config.get_vocab_size()
    return _LOGIT_COPIES * 4 * num_rows * vocab_size * (config.gamma + 1)


def logits_in_flight(config: ResolvedConfig, vllm_config) -> int:
    """Return the bytes of level 2's logits during a proposal, without those in graphs."""
    seqs = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
    has_graphs = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    return 0 if has_graphs and seqs <= MAX_ROWS else _logits(config, vllm_config, seqs)


def summary_bytes_per_kv_byte(layers: dict, config: ResolvedConfig, vllm_config) -> float:
    """Return the bytes of chunk summaries per byte of KV cache.

    Each kind of summary has one vector per block, layer and KV head, where the KV cache has
    ``2 * block_size`` vectors.
    """
    kinds = len(POLICIES[config.policy].summaries)
    if not kinds:
        return 0.0
    itemsize, cache_itemsize = _itemsizes(vllm_config)
    dim = next(iter(layers.values())).head_size
    summary = dim + SCALE_BYTES
    if not vllm_config.use_v2_model_runner:
        # A request that selects has a copy of its context's summaries in the model's dtype.
        summary += dim * itemsize
    return kinds * summary / (2 * config.block_size * dim * cache_itemsize)


def kv_cache_budget(available_bytes: int, fixed: int, share: float, config) -> int:
    """Return the bytes that remain for vLLM's KV cache beside ``fixed`` and the summaries' share.

    Raises:
        ValueError: nothing remains.
    """
    kv_bytes = int((available_bytes - fixed) / (1 + share))
    if kv_bytes <= 0:
        raise ValueError(
            f"TriForce keeps {fixed / 2**30:.2f} GiB beside the KV cache, but only "
            f"{available_bytes / 2**30:.2f} GiB are available; lower max_speculating_seqs="
            f"{config.max_speculating_seqs} or --max-num-seqs, or raise --gpu-memory-utilization"
        )
    return kv_bytes
