"""Summaries of blocks that became full, for all layers, heads and requests in one launch."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.cache.quantized_summaries import QuantizedSummaries
from vllm_triforce.selection import Summary


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
    scales_layer_stride,
    scales_head_stride,
    KIND: tl.constexpr,  # of Summary
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
):
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
    key = tl.load(keys + block * block_stride + head * head_stride + offsets, mask=mask, other=0.0)
    key = key.to(tl.float32)
    if KIND == "mean":
        found = tl.sum(key, axis=0) / BLOCK_SIZE
    elif KIND == "min":
        found = tl.min(tl.where(is_token, key, float("inf")), axis=0)
    else:
        found = tl.max(tl.where(is_token, key, float("-inf")), axis=0)
    found = found * tl.load(key_scales + layer)
    found = tl.where(dims < HEAD_DIM, found, 0.0)
    scale = tl.max(tl.abs(found), axis=0) / 127
    steps = tl.floor(found / tl.where(scale > 0, scale, 1.0) + 0.5)
    place = layer * scales_layer_stride + head * scales_head_stride + block
    tl.store(scales_ptr + place, scale)
    out = values_ptr + place * HEAD_DIM + dims
    tl.store(out, steps.to(tl.int8), mask=dims < HEAD_DIM)


class KeyPointers:
    """Where the keys of each layer are; all layers have the same strides.

    Args:
        keys: per layer [num_blocks, block_size, num_kv_heads, head_dim], a view of its KV cache.
        scales: per layer, what a stored number is multiplied by (1 unless the cache is quantized).
    """

    def __init__(self, keys: list[torch.Tensor], scales: list[float]) -> None:
        if len({(k.stride(), k.shape, k.dtype) for k in keys}) != 1:
            raise ValueError("the layers that retrieve have KV caches of different layouts")
        self.like = keys[0]
        self.device = device = keys[0].device
        self.pointers = torch.tensor(
            [k.data_ptr() for k in keys], dtype=torch.uint64, device=device
        )
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)
        _, self.block_size, self.num_heads, self.head_dim = keys[0].shape
        self.strides = keys[0].stride()[:3]


def update_chunk_summaries(
    keys: KeyPointers,
    kind: Summary,
    summaries: QuantizedSummaries,
    tables: torch.Tensor,  # [num_reqs, width], int32, block tables
    first: torch.Tensor,  # [num_reqs], int32, logical block to begin with
    last: torch.Tensor,  # [num_reqs], int32, logical block to stop before
    max_blocks: int,  # upper bound of last - first
) -> None:
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
        summaries.scales.stride(0),
        summaries.scales.stride(1),
        KIND=kind.value,
        BLOCK_SIZE=keys.block_size,
        HEAD_DIM=keys.head_dim,
        PADDED_DIM=triton.next_power_of_2(keys.head_dim),
        PADDED_BLOCK=triton.next_power_of_2(keys.block_size),
    )
