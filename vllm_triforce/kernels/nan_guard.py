"""Removal of NaN from KV blocks of requests whose logits had one, without a wait of the host."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.row_table import COMPUTED, HAS_NAN, RESERVED, row_value
from vllm_triforce.kernels.rows import Rows

_BLOCK = 1024


class NanScrubber:
    """Writes 0 over NaN and infinities in KV blocks of rows whose logits had a NaN.

    Attention kernels multiply masked values by 0, and 0 times NaN is NaN. A NaN of level 2 in a
    lookahead slot would reach the full pass, which reads the slot's block before it writes the slot
    again. A NaN of level 1 in a window would reach the window's next owner. It is one launch, which
    nearly always has nothing to do.

    Args:
        caches: KV cache of each layer, [num_blocks, ...], all of one dtype.
    """

    def __init__(self, caches: list[torch.Tensor], block_size: int, device: torch.device) -> None:
        self._caches = caches  # keeps the memory at these addresses alive
        self._block_size = block_size
        self._addresses = _int64_tensor([cache.data_ptr() for cache in caches], device)
        self._strides = _int64_tensor([cache.stride(0) for cache in caches], device)
        self._spans = _int64_tensor([_span(cache[0]) for cache in caches], device)
        self._type = stored_type(caches[0].dtype)

    def __call__(
        self,
        rows: Rows,
        tables: torch.Tensor,  # [num_rows, width], int32
        reach: int | None,  # tokens written after the computed ones; None for all blocks
    ) -> None:
        _scrub_kernel[(rows.num_rows, len(self._caches))](
            self._addresses,
            self._strides,
            self._spans,
            rows.table,
            rows.max_rows,
            tables,
            tables.stride(0),
            tables.shape[1],
            self._block_size,
            reach or 0,
            WHOLE=reach is None,
            TYPE=self._type,
            IS_FP8=self._type == tl.uint8,
            BLOCK=_BLOCK,
        )


@triton.jit
def _scrub_kernel(
    caches_ptr,  # [num_layers], int64, addresses
    strides_ptr,  # [num_layers], int64, from block to block, in elements
    spans_ptr,  # [num_layers], int64, elements from the first of a block to its last
    table_ptr,
    max_rows,
    tables_ptr,  # [num_rows, width]
    table_stride,
    width,
    block_size,
    reach,
    WHOLE: tl.constexpr,
    TYPE: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    layer = tl.program_id(1)
    if row_value(table_ptr, max_rows, row, HAS_NAN) == 0:
        return
    first = 0
    end = width
    if not WHOLE:
        computed = row_value(table_ptr, max_rows, row, COMPUTED)
        first = computed // block_size
        end = tl.minimum((computed + reach) // block_size + 1, width)
        end = tl.minimum(end, row_value(table_ptr, max_rows, row, RESERVED) // block_size)
    cache = tl.load(caches_ptr + layer).to(tl.pointer_type(TYPE))
    stride = tl.load(strides_ptr + layer)
    span = tl.load(spans_ptr + layer)
    for index in range(first, end):
        block = cache + tl.load(tables_ptr + row * table_stride + index).to(tl.int64) * stride
        for start in range(0, span, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < span
            values = tl.load(block + offsets, mask=mask, other=0)
            if IS_FP8:  # NaN in e4m3: all bits except the sign's
                is_bad = (values & 127) == 127
            else:
                number = values.to(tl.float32)
                is_bad = (number != number) | (tl.abs(number) == float("inf"))
            tl.store(block + offsets, tl.zeros_like(values), mask=mask & is_bad)


def stored_type(dtype: torch.dtype):
    """Return Triton's dtype of a KV cache; 8-bit elements are bytes."""
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return types.get(dtype, tl.uint8)


def _int64_tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _span(block: torch.Tensor) -> int:
    """Count the elements from a block's first to its last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride()))
