"""Scores of every retrieval chunk, for all layers at once, without gathering mean keys."""

from collections.abc import Mapping

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.cache.quantized_summaries import QuantizedSummaries
from vllm_triforce.selection import Summary

_CHUNKS_PER_PROGRAM = 64


@triton.jit(do_not_specialize=["max_chunks"])
def _chunk_scores_kernel(
    queries_ptr,  # [num_layers, num_rows, num_heads, head_dim]
    query_layer_stride,
    query_row_stride,
    query_rows_ptr,  # [num_reqs]
    means_ptr,  # [num_layers, num_kv_heads, num_blocks, head_dim]
    mean_scales_ptr,  # [num_layers, num_kv_heads, num_blocks]
    means_layer_stride,
    means_head_stride,
    tables_ptr,  # [num_reqs, width]
    table_stride,
    num_chunks_ptr,  # [num_reqs]
    scores_ptr,  # [num_reqs, num_layers, num_heads, num_chunks]
    num_layers,
    max_chunks,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = (tl.program_id(1) % num_layers).to(tl.int64)
    kv_head = (tl.program_id(1) // num_layers).to(tl.int64)
    num_kv_heads = tl.num_programs(1) // num_layers
    chunks = tl.program_id(2) * CHUNKS + tl.arange(0, CHUNKS)
    # The first chunk is kept without a vote.
    is_candidate = (chunks > 0) & (chunks < tl.load(num_chunks_ptr + row))
    blocks = tl.load(tables_ptr + row * table_stride + chunks, mask=is_candidate, other=0)
    dims = tl.arange(0, PADDED_DIM)
    places = layer * means_layer_stride + kv_head * means_head_stride + blocks.to(tl.int64)
    means = tl.load(
        means_ptr + places[:, None] * HEAD_DIM + dims[None, :],
        mask=is_candidate[:, None] & (dims[None, :] < HEAD_DIM),
        other=0,
    ).to(tl.float32)
    scales = tl.load(mean_scales_ptr + places, mask=is_candidate, other=0.0) * scale
    query_row = tl.load(query_rows_ptr + row).to(tl.int64)
    for member in tl.static_range(GROUP):
        head = kv_head * GROUP + member
        query = tl.load(
            queries_ptr
            + layer * query_layer_stride
            + query_row * query_row_stride
            + head * HEAD_DIM
            + dims,
            mask=dims < HEAD_DIM,
            other=0.0,
        ).to(tl.float32)
        score = tl.sum(means * query[None, :], axis=1) * scales
        score = tl.where(is_candidate, score, float("-inf"))
        place = ((row * num_layers + layer) * num_kv_heads * GROUP + head) * max_chunks
        tl.store(scores_ptr + place + chunks, score, mask=chunks < max_chunks)


def score_chunks(
    queries: torch.Tensor,  # [num_layers, num_rows, num_heads, head_dim]
    query_rows: torch.Tensor,  # [num_reqs], int32, each request's row of queries
    summaries: Mapping[Summary, QuantizedSummaries],
    tables: torch.Tensor,  # [num_reqs, width], int32, block tables
    num_chunks: torch.Tensor,  # [num_reqs], int32, chunks before the tail
    max_chunks: int,  # columns of the result
) -> torch.Tensor:  # [num_reqs, num_layers, num_kv_heads, max_chunks], float32
    """Votes of ``selection/retrieval.py``, products of queries and mean keys: with several
    query heads to a KV head, each votes with its softmax over the candidates.

    Chunks that are no candidates (the first, and all from the tail on) have -inf.
    """
    means = summaries[Summary.MEAN]
    num_layers, _, num_heads, head_dim = queries.shape
    num_kv_heads, num_reqs = means.values.shape[1], len(tables)
    group = num_heads // num_kv_heads
    scores = torch.empty(
        (num_reqs, num_layers, num_heads, max_chunks), dtype=torch.float32, device=queries.device
    )
    grid = (num_reqs, num_layers * num_kv_heads, triton.cdiv(max_chunks, _CHUNKS_PER_PROGRAM))
    _chunk_scores_kernel[grid](
        queries,
        queries.stride(0),
        queries.stride(1),
        query_rows,
        means.values,
        means.scales,
        means.scales.stride(0),
        means.scales.stride(1),
        tables,
        tables.stride(0),
        num_chunks,
        scores,
        num_layers,
        max_chunks,
        head_dim**-0.5 if group > 1 else 1.0,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        CHUNKS=_CHUNKS_PER_PROGRAM,
    )
    if group == 1:
        return scores
    votes = torch.softmax(scores.unflatten(2, (num_kv_heads, group)), -1).sum(3)
    places = torch.arange(max_chunks, device=votes.device)
    candidates = (places > 0) & (places < num_chunks[:, None])
    return votes.masked_fill_(~candidates[:, None, None], float("-inf"))
