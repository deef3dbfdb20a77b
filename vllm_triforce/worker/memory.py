"""What TriForce keeps on a GPU beside vLLM's KV cache, and must be left room for."""

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.selection import POLICIES


def room_for_kv_cache(
    available_bytes: int, layers: dict, config: ResolvedConfig, vllm_config
) -> int:
    """What is left of vLLM's estimate for its KV cache.

    Chunk summaries grow with the KV cache: of each kind one key per block, layer and KV head, where
    the cache has ``2 * block_size`` vectors. The rest is fixed: selections and block tables of
    ``max_speculating_seqs`` requests, and one query per request and layer.

    Raises:
        ValueError: nothing is left.
    """
    some = next(iter(layers.values()))
    num_layers, heads, dim = len(layers), some.num_kv_heads, some.head_size
    scheduler = vllm_config.scheduler_config
    seqs = min(scheduler.max_num_seqs, config.max_speculating_seqs)
    itemsize = vllm_config.model_config.dtype.itemsize
    cache_itemsize = 1 if "fp8" in vllm_config.cache_config.cache_dtype else itemsize
    fixed = 2 * 4 * seqs * num_layers * heads * (config.budget_blocks + 16)
    fixed += scheduler.max_num_seqs * num_layers * some.num_heads * dim * itemsize
    kinds = len(POLICIES[config.selection].summaries)
    share = kinds * itemsize / (2 * config.block_size * cache_itemsize)
    left = int((available_bytes - fixed) / (1 + share))
    if left <= 0:
        raise ValueError(
            f"TriForce keeps {fixed / 2**30:.2f} GiB beside the KV cache, but only "
            f"{available_bytes / 2**30:.2f} GiB are available; lower max_speculating_seqs="
            f"{config.max_speculating_seqs} or --max-num-seqs, or raise --gpu-memory-utilization"
        )
    return left
