"""Measures the constants of ``Machine`` on this CPU, in float32.

Bandwidth is a sum over 1 GB, the weights' share of it a matrix-vector product. Arithmetic is a
large matrix product, the share for few tokens a product with 32 rows. A small operation is timed
with cold caches, as a decoding step meets it.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from vllm_triforce_bench.predict.machine import Machine

_REPEATS = 5
_HEAD_DIM, _BLOCK_SIZE = 64, 128


def measure_cpu(scale: float = 0.5) -> Machine:
    """Measure this CPU, some seconds.

    Times are medians, not minima: other programs share the processor while vLLM serves, too.

    Args:
        scale: factor on the size of every operand.
    """

    def scaled(count: int) -> int:
        return max(64, int(count * scale))

    stream = torch.ones(scaled(250_000_000))
    bandwidth = stream.nbytes / _median_s(stream.sum)
    matrix, vector = torch.ones(scaled(8192), scaled(8192)), torch.ones(scaled(8192))
    weights_bandwidth = matrix.nbytes / _median_s(lambda: torch.mv(matrix, vector))
    side, num_rows = scaled(2048), 32
    factor, rows = torch.ones(side, side), torch.ones(num_rows, side)
    flops = 2 * side**3 / _median_s(lambda: factor @ factor)
    few_rows_flops = 2 * num_rows * side**2 / _median_s(lambda: rows @ factor)
    operation_s = _cold_operation_s(stream[: scaled(16_000_000)])
    attention_bandwidth, attention_flops = _attention_rates(scaled(32_768))
    bandwidth = max(bandwidth, weights_bandwidth)
    flops = max(flops, few_rows_flops, attention_flops)
    return Machine(
        f"{platform.machine()}, {torch.get_num_threads()} threads",
        float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bandwidth,
        flops,
        bandwidth_share=weights_bandwidth / bandwidth,
        flops_share=few_rows_flops / flops,
        attention_bandwidth_share=min(1.0, attention_bandwidth / bandwidth),
        attention_flops_share=attention_flops / flops,
        launch_seconds=operation_s,
        kernel_seconds=operation_s,
    )


def _median_s(run: Callable[[], object]) -> float:
    """Median seconds of a call, the first not counted."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _cold_operation_s(memory: torch.Tensor) -> float:
    """Seconds of an operation on a few numbers after ``memory`` has emptied the caches."""
    numbers = torch.arange(7.0)
    operations = (
        lambda: numbers + 1,
        lambda: numbers.argmax(),
        lambda: numbers.index_select(0, torch.tensor([1, 2])),
        lambda: torch.cat((numbers, numbers)),
        lambda: numbers.cumsum(0),
    )
    seconds = []
    for _ in range(4 * _REPEATS):
        memory.sum()
        begin = time.perf_counter()
        for operation in operations:
            operation()
        seconds.append((time.perf_counter() - begin) / len(operations))
    return statistics.median(seconds)


def _attention_rates(kv_tokens: int) -> tuple[float, float]:
    """Measure vLLM's CPU attention kernel over a context.

    Returns:
        Bytes of KV cache read per second by one token without grouped heads, and operations per
        second of four tokens with four query heads to a KV head.
    """
    read_bytes = kv_tokens * 16 * 2 * _HEAD_DIM * 4
    operations = 4 * kv_tokens * 32 * _HEAD_DIM * 4
    return (
        read_bytes / _attention_s(kv_tokens, 16, 16, 1),
        operations / _attention_s(kv_tokens, 32, 8, 4),
    )


def _attention_s(kv_tokens: int, num_heads: int, num_kv_heads: int, query_tokens: int) -> float:
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_blocks = -(-kv_tokens // _BLOCK_SIZE)
    shape = num_blocks, num_kv_heads, 2 * _BLOCK_SIZE, _HEAD_DIM
    keys, values = torch.full(shape, 0.01).chunk(2, dim=2)
    query = torch.ones(query_tokens, num_heads, _HEAD_DIM)
    query_start_loc = torch.tensor([0, query_tokens], dtype=torch.int32)
    seq_lens = torch.tensor([kv_tokens], dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_HEAD_DIM,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=query_start_loc,
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
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            scale=_HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )

    return _median_s(run)
