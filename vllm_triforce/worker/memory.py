"""What TriForce keeps on a GPU beside vLLM's KV cache, and must be left room for."""

from vllm.config.compilation import CUDAGraphMode

from vllm_triforce.cache.summaries import SCALE_BYTES
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.runner_v2.graph_sizes import MAX_ROWS
from vllm_triforce.selection import POLICIES

# Copies in float32 of level 2's logits that a proposal with top-k or top-p makes.
_LOGIT_COPIES = 4


def buffer_bytes(
    layers: dict, draft_layers: dict, config: ResolvedConfig, vllm_config
) -> dict[str, int]:
    """Bytes that are taken whatever the KV cache's size, by what for.

    They are for ``max_speculating_seqs`` requests, but for the queries. What CUDA itself takes for
    a graph is not among them (``SpeculatorV2.graph_bytes``).

    Args:
        layers, draft_layers: attention layers of the target and of the draft, by name.
    """
    some = next(iter(layers.values()))
    num_layers, heads, dim = len(layers), some.num_kv_heads, some.head_size
    scheduler = vllm_config.scheduler_config
    seqs = min(scheduler.max_num_seqs, config.max_speculating_seqs)
    itemsize = vllm_config.model_config.dtype.itemsize
    cache_itemsize = 1 if "fp8" in vllm_config.cache_config.cache_dtype else itemsize
    vocab_size = vllm_config.model_config.get_vocab_size()
    of_a_place = seqs * vocab_size * vllm_config.model_config.head_dtype.itemsize
    blocks = -(-config.window_tokens // config.block_size)
    windows = sum(
        2 * seqs * blocks * config.block_size * its.num_kv_heads * its.head_size * cache_itemsize
        for its in draft_layers.values()
    )
    selected = config.budget_blocks - config.recent_blocks
    found = {
        "proposals' distributions": of_a_place * config.num_speculative_tokens,
        "selections": 4 * seqs * num_layers * heads * (selected + config.table_width),
        "queries": min(scheduler.max_num_seqs, config.max_batch)
        * num_layers
        * some.num_heads
        * dim
        * itemsize,
        "the draft's windows": windows,
        "the draft's distributions": of_a_place * config.gamma if draft_layers else 0,
    }
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        found["graphs' logits"] = _logits(config, vllm_config, min(seqs, MAX_ROWS))
    return found


def _logits(config: ResolvedConfig, vllm_config, num_rows: int) -> int:
    vocab_size = vllm_config.model_config.get_vocab_size()
    return _LOGIT_COPIES * 4 * num_rows * vocab_size * (config.gamma + 1)


def logits_in_flight(config: ResolvedConfig, vllm_config) -> int:
    """Bytes of level 2's logits while a proposal is made, beside those in graphs."""
    seqs = min(vllm_config.scheduler_config.max_num_seqs, config.max_speculating_seqs)
    has_graphs = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    return 0 if has_graphs and seqs <= MAX_ROWS else _logits(config, vllm_config, seqs)


def summary_share(layers: dict, config: ResolvedConfig, vllm_config) -> float:
    """Return the bytes of chunk summaries for each byte of KV cache: of each kind one vector per
    block, layer and KV head, where the cache has ``2 * block_size``."""
    itemsize = vllm_config.model_config.dtype.itemsize
    cache_itemsize = 1 if "fp8" in vllm_config.cache_config.cache_dtype else itemsize
    dim = next(iter(layers.values())).head_size
    kinds = len(POLICIES[config.policy].summaries)
    # Runner V1 keeps them in the model's dtype, V2 in a byte a number.
    summary = dim + SCALE_BYTES if vllm_config.use_v2_model_runner else dim * itemsize
    return kinds * summary / (2 * config.block_size * dim * cache_itemsize)


def extra_memory(
    layers: dict, draft_layers: dict, config: ResolvedConfig, vllm_config
) -> tuple[int, float]:
    """Bytes that are taken whatever the KV cache's size, and for each of its bytes.

    Args:
        layers, draft_layers: attention layers of the target and of the draft, by name.
    """
    fixed = buffer_bytes(layers, draft_layers, config, vllm_config)
    return sum(fixed.values()), summary_share(layers, config, vllm_config)


def kv_cache_budget(available_bytes: int, fixed: int, share: float, config) -> int:
    """What is left of vLLM's estimate for its KV cache.

    Args:
        fixed, share: of ``extra_memory()``.

    Raises:
        ValueError: nothing is left.
    """
    left = int((available_bytes - fixed) / (1 + share))
    if left <= 0:
        raise ValueError(
            f"TriForce keeps {fixed / 2**30:.2f} GiB beside the KV cache, but only "
            f"{available_bytes / 2**30:.2f} GiB are available; lower max_speculating_seqs="
            f"{config.max_speculating_seqs} or --max-num-seqs, or raise --gpu-memory-utilization"
        )
    return left
