"""What share of bandwidth and arithmetic vLLM's attention reaches on a CPU."""

from collections.abc import Callable

import torch

_HEAD_DIM, _BLOCK_SIZE = 64, 128


def attention_rates(
    kv_tokens: int, timed: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """Of vLLM's CPU kernel, in float32, over a context of so many tokens.

    Args:
        timed: seconds that a call takes.

    Returns:
        Bytes of KV cache read a second, by a token whose heads all have keys of their own; and
        operations a second of four tokens whose heads share keys by fours.
    """
    seconds = _seconds(kv_tokens, 16, 16, 1, timed)
    read = kv_tokens * 16 * 2 * _HEAD_DIM * 4
    computed = 4 * kv_tokens * 32 * _HEAD_DIM * 4
    return read / seconds, computed / _seconds(kv_tokens, 32, 8, 4, timed)


def _seconds(kv_tokens: int, heads: int, kv_heads: int, query_tokens: int, timed) -> float:
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_blocks = -(-kv_tokens // _BLOCK_SIZE)
    shape = num_blocks, kv_heads, 2 * _BLOCK_SIZE, _HEAD_DIM
    keys, values = torch.full(shape, 0.01).chunk(2, dim=2)
    query = torch.ones(query_tokens, heads, _HEAD_DIM)
    starts = torch.tensor([0, query_tokens], dtype=torch.int32)
    seq_lens = torch.tensor([kv_tokens], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(query.dtype, _BLOCK_SIZE, _HEAD_DIM),
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )

    def run() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=torch.empty_like(query),
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=_HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    return timed(run)
