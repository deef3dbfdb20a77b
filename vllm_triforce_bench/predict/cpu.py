"""Measures the constants of ``Machine`` on this CPU, in float32.

Bandwidth is a sum over 1 GB, the weights' share of it a matrix-vector product. Arithmetic is a
large matrix product, the share for few tokens a product with 32 rows. Attention's shares are of
vLLM's kernel. A small operation is timed with cold caches, as a decoding step meets it.
"""

import os
import platform
import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_triforce_bench.predict.machine import Machine

_HEAD_DIM, _BLOCK_SIZE, _NUM_ROWS = 64, 128, 32


def measure_cpu(scale: float = 0.5) -> Machine:
    """Measure this CPU, some seconds.

    Times are medians, not minima: other programs share the processor while vLLM serves, too.

    Args:
        scale: factor on the size of every operand.
    """

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones([max(64, int(size * scale)) for size in shape])

    stream, matrix, vector = ones(250_000_000), ones(8192, 8192), ones(8192)
    factor = ones(2048, 2048)
    rows = factor[:_NUM_ROWS]
    weights_bandwidth = matrix.nbytes / _median_s(lambda: torch.mv(matrix, vector))
    few_rows_flops = 2 * _NUM_ROWS * factor.numel() / _median_s(lambda: rows @ factor)
    # One token without grouped heads, which is bound by reading; four tokens with four query heads
    # to a KV head, by arithmetic.
    kv_tokens = max(64, int(32_768 * scale))
    attention_bandwidth = kv_tokens * 16 * 2 * _HEAD_DIM * 4 / _attention_s(kv_tokens, 16, 16, 1)
    attention_flops = 4 * kv_tokens * 32 * _HEAD_DIM * 4 / _attention_s(kv_tokens, 32, 8, 4)
    bandwidth = max(stream.nbytes / _median_s(stream.sum), weights_bandwidth)
    flops = 2 * len(factor) ** 3 / _median_s(lambda: factor @ factor)
    flops = max(flops, few_rows_flops, attention_flops)
    operation_s = _cold_operation_s(ones(16_000_000))
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


def _median_s(
    run: Callable[[], object], repeats: int = 5, prepare: Callable[[], object] = lambda: None
) -> float:
    """Return the median seconds of a call after ``prepare()``, the first not counted."""
    return statistics.median(timeit.repeat(run, prepare, repeat=repeats + 1, number=1)[1:])


def _cold_operation_s(memory: torch.Tensor) -> float:
    """Measure an operation on a few numbers after ``memory`` has emptied the caches."""
    numbers = torch.arange(7.0)

    def operations() -> None:
        numbers + 1
        numbers.argmax()
        numbers.index_select(0, torch.tensor([1, 2]))
        torch.cat((numbers, numbers))
        numbers.cumsum(0)

    return _median_s(operations, 20, memory.sum) / 5


def _attention_s(kv_tokens: int, num_heads: int, num_kv_heads: int, query_tokens: int) -> float:
    """Measure vLLM's attention kernel for one request."""
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_blocks = -(-kv_tokens // _BLOCK_SIZE)
    shape = num_blocks, num_kv_heads, 2 * _BLOCK_SIZE, _HEAD_DIM
    keys, values = torch.full(shape, 0.01).chunk(2, dim=2)
    query = torch.ones(query_tokens, num_heads, _HEAD_DIM)
    output = torch.empty_like(query)
    common: dict[str, Any] = {
        "query_start_loc": torch.tensor([0, query_tokens], dtype=torch.int32),
        "seq_lens": torch.tensor([kv_tokens], dtype=torch.int32),
        "causal": True,
    }
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_HEAD_DIM,
        dtype=query.dtype,
        sliding_window_size=-1,
        isa=_get_attn_isa(query.dtype, _BLOCK_SIZE, _HEAD_DIM),
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        **common,
    )
    attend = partial(
        ops.cpu_attention_with_kv_cache,
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        scale=_HEAD_DIM**-0.5,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=None,
        **common,
    )
    return _median_s(attend)
