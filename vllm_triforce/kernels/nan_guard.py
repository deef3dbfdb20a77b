"""Removal of NaN from KV blocks of requests whose logits had one, without a wait of the host."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.rows import Rows

_BLOCK = tl.constexpr(1024)


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
        layers = [(cache.data_ptr(), cache.stride(0), _span(cache[0])) for cache in caches]
        self._layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self._type = stored_type(caches[0].dtype)

    def __call__(
        self,
        rows: Rows,
        tables: torch.Tensor,  # [num_rows, width], int32
        reach: int | None,  # tokens written after the computed ones; None for all blocks
    ) -> None:
        _scrub_kernel[(rows.num_rows, len(self._caches))](
            self._layers,
            rows.table,
            tables,
            tables.stride(0),
            tables.shape[1],
            self._block_size,
            reach or 0,
            WHOLE=reach is None,
            TYPE=self._type,
            IS_FP8=self._type == tl.uint8,
        )


@triton.jit
def _scrub_kernel(
    layers_ptr,  # [num_layers, 3], int64: address; from block to block, and in one, in elements
    table_ptr,
    tables_ptr,  # [num_rows, width]
    table_stride,
    width,
    block_size,
    reach,
    WHOLE: tl.constexpr,
    TYPE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    row = tl.program_id(0)
    layer = tl.program_id(1)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    if tl.load(row_ptr + col.HAS_NAN) == 0:
        return
    first = 0
    end = width
    if not WHOLE:
        computed = tl.load(row_ptr + col.COMPUTED)
        first = computed // block_size
        end = tl.minimum((computed + reach) // block_size + 1, width)
        end = tl.minimum(end, tl.load(row_ptr + col.RESERVED) // block_size)
    cache = tl.load(layers_ptr + layer * 3).to(tl.pointer_type(TYPE))
    stride = tl.load(layers_ptr + layer * 3 + 1)
    span = tl.load(layers_ptr + layer * 3 + 2)
    for index in range(first, end):
        block = cache + tl.load(tables_ptr + row * table_stride + index).to(tl.int64) * stride
        for start in range(0, span, _BLOCK):
            offsets = start + tl.arange(0, _BLOCK)
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


def _span(block: torch.Tensor) -> int:
    """Count the elements from a block's first to its last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride()))
