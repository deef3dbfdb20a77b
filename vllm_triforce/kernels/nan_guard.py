"""Requests in whose logits there was a NaN: found, and what it may have reached made finite, on the
device, so that the host need not wait to know."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.row_table import COMPUTED, HAS_NAN, RESERVED, row_value
from vllm_triforce.kernels.rows import Rows

_BLOCK = 1024


@triton.jit
def _scrub_kernel(
    caches_ptr,  # [num_layers], int64, addresses
    strides_ptr,  # [num_layers], int64, from block to block, in numbers
    spans_ptr,  # [num_layers], int64, numbers from the first of a block to its last
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
            places = start + tl.arange(0, BLOCK)
            mask = places < span
            found = tl.load(block + places, mask=mask, other=0)
            if IS_FP8:  # e4m3: all bits but the sign's
                wrong = (found & 127) == 127
            else:
                number = found.to(tl.float32)
                wrong = (number != number) | (tl.abs(number) == float("inf"))
            tl.store(block + places, tl.zeros_like(found), mask=mask & wrong)


class NanScrubber:
    """Puts 0 in the place of NaN and infinities in KV blocks of the rows that have a fault.

    Kernels multiply what is masked by 0, and 0 times NaN is NaN: what level 2 left in lookahead
    slots would reach the full pass, which writes them again but reads their block before, and what
    level 1 left in a window would reach the window's next owner. One launch, and nearly always
    nothing to do in it.

    Args:
        caches: of each layer, [num_blocks, ...]; of one dtype.
    """

    def __init__(self, caches: list[torch.Tensor], block_size: int, device: torch.device) -> None:
        self._caches = caches  # they must live as long as their addresses are used
        self._block_size = block_size
        self._addresses = _numbers([cache.data_ptr() for cache in caches], device)
        self._strides = _numbers([cache.stride(0) for cache in caches], device)
        self._spans = _numbers([_span(cache[0]) for cache in caches], device)
        self._type = stored_type(caches[0].dtype)

    def __call__(
        self,
        rows: Rows,
        tables: torch.Tensor,  # [num_rows, width], int32
        reach: int | None,  # tokens after the computed ones that were written; None: all blocks
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


def stored_type(dtype: torch.dtype):
    """Triton's, of a KV cache; numbers of 8 bits are bytes."""
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return types.get(dtype, tl.uint8)


def _numbers(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _span(block: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride()))
