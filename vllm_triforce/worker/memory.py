"""What TriForce keeps on a GPU beside vLLM's KV cache, and must be left room for."""

from vllm.config.compilation import CUDAGraphMode

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.device.row_work import MAX_ROWS
from vllm_triforce.selection import POLICIES

# Copies in float32 of level 2's logits that a proposal with top-k or top-p makes.
_LOGIT_COPIES = 4


def beside_kv_cache(
    layers: dict, draft_layers: dict, config: ResolvedConfig, vllm_config
) -> tuple[int, float]:
    """Bytes that are taken whatever the KV cache's size, and for each of its bytes.

    Chunk summaries grow with the KV cache: of each kind one key per block, layer and KV head, where
    the cache has ``2 * block_size`` vectors. The rest is fixed: for ``max_speculating_seqs``
    requests selections and block tables, the draft's windows, and logits of levels 1 and 2, those
    in CUDA graphs apart; and one query per request and layer. What CUDA itself takes for a graph is
    not counted.

    Args:
        layers, draft_layers: attention layers of the target and of the draft, by name.
    """
    some = next(iter(layers.values()))
    num_layers, heads, dim = len(layers), some.num_kv_heads, some.head_size
    scheduler = vllm_config.scheduler_config
    seqs = min(scheduler.max_num_seqs, config.max_speculating_seqs)
    itemsize = vllm_config.model_config.dtype.itemsize
    cache_itemsize = 1 if "fp8" in vllm_config.cache_config.cache_dtype else itemsize
    fixed = 2 * 4 * seqs * num_layers * heads * (config.budget_blocks + 16)
    fixed += scheduler.max_num_seqs * num_layers * some.num_heads * dim * itemsize
    blocks = -(-config.window_tokens // config.block_size)
    for layer in draft_layers.values():
        window = 2 * blocks * config.block_size * layer.num_kv_heads * layer.head_size
        fixed += seqs * window * cache_itemsize
    vocab_size = vllm_config.model_config.get_vocab_size()
    of_level1 = config.gamma * itemsize if draft_layers else 0
    logits = 4 * seqs * vocab_size * (config.gamma + 1)
    fixed += seqs * vocab_size * of_level1 + _LOGIT_COPIES * logits
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        fixed += _LOGIT_COPIES * logits * min(seqs, MAX_ROWS) // seqs  # graphs keep their memory
    kinds = len(POLICIES[config.selection].summaries)
    share = kinds * itemsize / (2 * config.block_size * cache_itemsize)
    return fixed, share


def room_for_kv_cache(available_bytes: int, fixed: int, share: float, config) -> int:
    """What is left of vLLM's estimate for its KV cache.

    Args:
        fixed, share: of ``beside_kv_cache()``.

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
