"""Retrieval: summaries of full blocks, and level 2's block tables.

Each is one launch for all layers, heads and requests.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.selection import Summary


class KeyPointers:
    """Addresses of each layer's keys; all layers have the same strides.

    Args:
        keys: per layer [num_blocks, block_size, num_kv_heads, head_dim], a view of its KV cache.
        scales: per layer, the factor of stored keys (1 unless the cache is quantized).
        chunk_size: tokens, a divisor of ``block_size``.
    """

    def __init__(self, keys: list[torch.Tensor], scales: list[float], chunk_size: int) -> None:
        if len({(k.stride(), k.shape, k.dtype) for k in keys}) != 1:
            raise ValueError("the layers that retrieve have KV caches of different layouts")
        self.like = keys[0]
        device, addresses = keys[0].device, [k.data_ptr() for k in keys]
        self.pointers = torch.tensor(addresses, dtype=torch.uint64, device=device)
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self.chunk_size = chunk_size
        _, block_size, self.num_heads, self.head_dim = keys[0].shape
        self.split = block_size // chunk_size
        self.strides = keys[0].stride()[:3]


def update_chunk_summaries(
    keys: KeyPointers,
    kind: Summary,
    summaries: QuantizedSummaries,
    tables: torch.Tensor,  # [num_reqs, width], int32, chunks
    first: torch.Tensor,  # [num_reqs], int32, logical chunk to begin with
    last: torch.Tensor,  # [num_reqs], int32, logical chunk to stop before
    max_blocks: int,  # upper bound of last - first
) -> None:
    """Summarize the chunks of each request from ``first`` to before ``last``."""
    if max_blocks <= 0:
        return
    block_stride, token_stride, head_stride = keys.strides
    num_layers = len(keys.pointers)
    _chunk_summaries_kernel[(len(tables) * max_blocks, keys.num_heads, num_layers)](
        keys.pointers,
        keys.like,
        keys.scales,
        summaries.values,
        summaries.scales,
        tables,
        tables.stride(0),
        first,
        last,
        max_blocks,
        block_stride,
        token_stride,
        head_stride,
        summaries.scales.shape[2],
        KIND=kind.value,
        SPLIT=keys.split,
        BLOCK_SIZE=keys.chunk_size,
        HEAD_DIM=keys.head_dim,
        PADDED_DIM=triton.next_power_of_2(keys.head_dim),
        PADDED_BLOCK=triton.next_power_of_2(keys.chunk_size),
    )


@triton.jit(do_not_specialize=["max_blocks"])
def _chunk_summaries_kernel(
    layer_key_ptrs,  # [num_layers], uint64
    key_like,  # any tensor of the keys' dtype
    key_scales,  # [num_layers]
    values_ptr,  # [num_layers, num_kv_heads, num_blocks, head_dim], written
    scales_ptr,  # [num_layers, num_kv_heads, num_blocks], written
    tables_ptr,  # [num_reqs, width]
    table_stride,
    first_ptr,  # [num_reqs]
    last_ptr,  # [num_reqs]
    max_blocks,
    block_stride,
    token_stride,
    head_stride,
    num_blocks,
    KIND: tl.constexpr,  # of Summary
    SPLIT: tl.constexpr,  # chunks of a KV block
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
):
    # A program summarizes one block of one head and layer. With max_blocks 4, program 6 is the
    # block first + 2 of row 1; programs from ``last`` on have nothing to do.
    row = tl.program_id(0) // max_blocks
    place = tl.load(first_ptr + row) + tl.program_id(0) % max_blocks
    if place >= tl.load(last_ptr + row):
        return
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    block = tl.load(tables_ptr + row * table_stride + place).to(tl.int64)

    keys = tl.cast(tl.load(layer_key_ptrs + layer), tl.pointer_type(key_like.dtype.element_ty))
    tokens = tl.arange(0, PADDED_BLOCK)
    dims = tl.arange(0, PADDED_DIM)
    offsets = tokens[:, None].to(tl.int64) * token_stride + dims[None, :]
    is_token = tokens[:, None] < BLOCK_SIZE
    mask = is_token & (dims[None, :] < HEAD_DIM)
    keys += block // SPLIT * block_stride + block % SPLIT * BLOCK_SIZE * token_stride
    key = tl.load(keys + head * head_stride + offsets, mask=mask, other=0.0)
    key = key.to(tl.float32)
    if KIND == "mean":
        summary = tl.sum(key, axis=0) / BLOCK_SIZE
    elif KIND == "min":
        summary = tl.min(tl.where(is_token, key, float("inf")), axis=0)
    else:
        summary = tl.max(tl.where(is_token, key, float("-inf")), axis=0)
    summary = summary * tl.load(key_scales + layer)
    summary = tl.where(dims < HEAD_DIM, summary, 0.0)
    scale = tl.max(tl.abs(summary), axis=0) / 127
    steps = tl.floor(summary / tl.where(scale > 0, scale, 1.0) + 0.5)
    place = (layer * tl.num_programs(1) + head) * num_blocks + block
    tl.store(scales_ptr + place, scale)
    out = values_ptr + place * HEAD_DIM + dims
    tl.store(out, steps.to(tl.int8), mask=dims < HEAD_DIM)


def build_sparse_tables(
    out: torch.Tensor,  # [num_layers, max_rows * num_kv_heads, width], int32, written
    rows: Rows,
    tables: torch.Tensor,  # [num_rows, table_width], int32, chunks
    chunk_ids: ChunkIds,
) -> None:
    """Build each table from as many first blocks as passes select, and the tail: recent blocks and
    all after them."""
    num_layers, num_seqs, width = out.shape
    _sparse_tables_kernel[(len(tables), num_seqs // rows.max_rows, num_layers)](
        out,
        out.stride(0),
        rows.table,
        tables,
        tables.stride(0),
        width,
        IDS=tuple(chunk_ids),
        BLOCK=min(1024, triton.next_power_of_2(width)),
    )


@triton.jit
def _sparse_tables_kernel(
    out_ptr,  # [num_layers, max_rows * num_kv_heads, width]
    out_layer_stride,
    table_ptr,
    tables_ptr,  # [num_rows, table_width]
    table_stride,
    width,
    IDS: tl.constexpr,  # ChunkIds
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    num_selected = tl.load(row_ptr + col.NUM_SELECTED)
    tail_start = tl.load(row_ptr + col.TAIL)
    num_blocks = tl.load(row_ptr + col.NUM_BLOCKS)
    out = out_ptr + layer * out_layer_stride + (row * num_heads + head) * width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        skipped = tl.where(column < num_selected, 0, tail_start - num_selected)
        logical = column + skipped
        is_allocated = logical < num_blocks
        block = tl.load(tables_ptr + row * table_stride + logical, mask=is_allocated, other=0)
        # Columns past the allocated blocks hold vLLM's null block, which no sequence reaches.
        ids = one_head_block(block, head, IDS)
        tl.store(out + column, ids, mask=column < width)


@triton.jit
def one_head_block(chunk, head, IDS: tl.constexpr):
    """Return the one-head block of a chunk (``ChunkIds.of``)."""
    return chunk // IDS[3] * IDS[0] + chunk % IDS[3] * IDS[2] + head * IDS[1]
