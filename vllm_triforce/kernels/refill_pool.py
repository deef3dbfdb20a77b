"""Refill of level 2's pool: copies of the blocks that it reads of layers in host memory."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.counters import NUM_POOL_BLOCKS, NUM_POOL_BYTES, NUM_POOL_HITS
from vllm_triforce.kernels.nan_guard import stored_type
from vllm_triforce.kernels.row_table import (
    COMPUTED,
    NEW_OWNER,
    NUM_SELECTED,
    REFRESH,
    SLOT,
    TAIL,
    row_value,
)
from vllm_triforce.kernels.rows import Rows

_CHUNK = 8  # places compared with all selected blocks at a time
_TOKENS = 16  # tokens copied at a time, in registers
_NOTHING = tl.constexpr(-1)


class PoolRefill:
    """Copies the rows' blocks to the pool, where the pool does not hold them yet.

    A selected block stays in its place for as long as it is selected: level 2 reads selected blocks
    in any order.

    Args:
        hosts, pools: KV cache of each layer in host memory, [num_blocks, num_kv_heads, block_size,
            size], and its pool, [num_slots * width, ...], with the same strides.
        first_layer: index of the first of these layers among the layers that retrieve.
        head_strides: strides of one-head block ids (``cache/one_head_blocks.py``).
        max_selected: selected blocks of a row and head at most.
        counters: [len(DeviceCounter)], int64, added to; it counts blocks of one head.
    """

    def __init__(
        self,
        hosts: list[torch.Tensor],
        pools: list[torch.Tensor],
        first_layer: int,
        num_slots: int,
        max_rows: int,
        head_strides: tuple[int, int],
        max_selected: int,
        counters: torch.Tensor,
    ) -> None:
        device, num_kv_heads, width = counters.device, hosts[0].shape[1], len(pools[0]) // num_slots
        self._caches = hosts, pools  # keeps the memory at these addresses alive
        self._hosts, self._pools = (
            torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device)
            for caches in (hosts, pools)
        )
        self._first_layer = first_layer
        self._head_strides = head_strides
        self._max_selected = max_selected
        self._counters = counters
        shape = (len(hosts), num_slots, num_kv_heads, width)
        self.held = torch.full(shape, -1, dtype=torch.int32, device=device)
        shape = (len(hosts), max_rows, num_kv_heads, width)
        self._missing = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.exact = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def __call__(self, rows: Rows, tables: torch.Tensor) -> None:
        """Refill the pool for the rows of a proposal.

        Args:
            tables: [num_layers, max_rows * num_kv_heads, width], int32, the rows' sparse tables.
        """
        num_layers, num_slots, num_heads, width = self.held.shape
        first = self._caches[0][0]
        block_stride, head_stride, token_stride, _ = first.stride()
        _, _, block_size, size = first.shape
        tables = tables[self._first_layer :]
        grid = (num_layers, rows.num_rows, num_heads)
        _place_selected_kernel[grid](
            self._missing,
            self.held,
            num_slots,
            tables,
            tables.stride(0),
            rows.table,
            rows.max_rows,
            width,
            CHUNK=_CHUNK,
            SELECTED=triton.next_power_of_2(max(1, self._max_selected)),
        )
        _refill_pool_kernel[grid](
            self._hosts,
            self._pools,
            self._missing,
            tables,
            tables.stride(0),
            self.held,
            num_slots,
            self.exact,
            rows.table,
            rows.max_rows,
            self._counters,
            width,
            block_size,
            *self._head_strides,
            block_stride,
            head_stride,
            token_stride,
            size,
            block_size * size * first.element_size(),
            TYPE=stored_type(first.dtype),
            TOKENS=min(_TOKENS, triton.next_power_of_2(block_size)),
            SIZE=triton.next_power_of_2(size),
        )
        _note_exact_kernel[(rows.num_rows,)](self.exact, rows.table, rows.max_rows)


@triton.jit
def _place_selected_kernel(
    missing_ptr,  # [num_host_layers, max_rows, num_heads, width], block to copy there; written
    held_ptr,  # [num_host_layers, num_slots, num_heads, width]
    num_slots,
    tables_ptr,  # [num_host_layers, max_rows * num_heads, width]
    table_layer_stride,
    rows_ptr,  # the row table
    max_rows,
    width,
    CHUNK: tl.constexpr,
    SELECTED: tl.constexpr,
):
    layer = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    num_heads = tl.num_programs(2)
    slot = row_value(rows_ptr, max_rows, row, SLOT).to(tl.int64)
    is_new = row_value(rows_ptr, max_rows, row, REFRESH) == NEW_OWNER
    num_selected = row_value(rows_ptr, max_rows, row, NUM_SELECTED)
    held = held_ptr + ((layer * num_slots + slot) * num_heads + head) * width
    missing = missing_ptr + ((layer * max_rows + row) * num_heads + head) * width
    table = tables_ptr + layer.to(tl.int64) * table_layer_stride
    table += (row * num_heads + head) * width
    index = tl.arange(0, SELECTED)
    wanted = tl.load(table + index, mask=index < num_selected, other=_NOTHING)
    is_held = tl.zeros([SELECTED], dtype=tl.int32)
    for start in range(0, num_selected, CHUNK):
        place = start + tl.arange(0, CHUNK)
        mask = (place < num_selected) & (is_new == 0)
        held_block = tl.load(held + place, mask=mask, other=_NOTHING)
        same = (held_block[:, None] == wanted[None, :]) & (held_block[:, None] != _NOTHING)
        is_held = tl.maximum(is_held, tl.max(same.to(tl.int32), axis=0))
    # The n-th missing block goes to the n-th place whose block is not wanted.
    is_missing = (index < num_selected) & (is_held == 0)
    nth_missing = tl.where(is_missing, tl.cumsum(is_missing.to(tl.int32), axis=0), 0)
    num_free = 0
    for start in range(0, num_selected, CHUNK):
        place = start + tl.arange(0, CHUNK)
        mask = (place < num_selected) & (is_new == 0)
        held_block = tl.load(held + place, mask=mask, other=_NOTHING)
        same = (held_block[:, None] == wanted[None, :]) & (held_block[:, None] != _NOTHING)
        is_free = (place < num_selected) & (tl.max(same.to(tl.int32), axis=1) == 0)
        nth = num_free + tl.cumsum(is_free.to(tl.int32), axis=0)
        num_free += tl.sum(is_free.to(tl.int32))
        is_target = is_free[:, None] & (nth[:, None] == nth_missing[None, :])
        block = tl.sum(tl.where(is_target, wanted[None, :], 0), axis=1)
        tl.store(missing + place, tl.where(is_free, block, _NOTHING), mask=place < num_selected)


@triton.jit
def _refill_pool_kernel(
    hosts_ptr,  # [num_host_layers], int64, addresses
    pools_ptr,  # [num_host_layers], int64, addresses
    missing_ptr,  # [num_host_layers, max_rows, num_heads, width]
    tables_ptr,  # [num_host_layers, max_rows * num_heads, width], one-head blocks in host memory
    table_layer_stride,
    held_ptr,  # [num_host_layers, num_slots, num_heads, width], blocks in the pool; written
    num_slots,
    exact_ptr,  # [num_slots], tokens up to which the pool's tail is exact
    rows_ptr,  # the row table
    max_rows,
    counters_ptr,  # [num_counters], added to
    width,
    block_size,
    per_block,
    per_head,
    block_stride,
    head_stride,
    token_stride,
    token_size,
    block_bytes,
    TYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    layer = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    num_heads = tl.num_programs(2)
    slot = row_value(rows_ptr, max_rows, row, SLOT).to(tl.int64)
    is_new = row_value(rows_ptr, max_rows, row, REFRESH) == NEW_OWNER
    computed = row_value(rows_ptr, max_rows, row, COMPUTED)
    tail = row_value(rows_ptr, max_rows, row, TAIL)
    num_selected = row_value(rows_ptr, max_rows, row, NUM_SELECTED)
    first_changed = tl.load(exact_ptr + slot) // block_size
    host = tl.load(hosts_ptr + layer).to(tl.pointer_type(TYPE))
    pool = tl.load(pools_ptr + layer).to(tl.pointer_type(TYPE))
    table = tables_ptr + layer.to(tl.int64) * table_layer_stride
    table += (row * num_heads + head) * width
    held = held_ptr + ((layer * num_slots + slot) * num_heads + head) * width
    missing = missing_ptr + ((layer * max_rows + row) * num_heads + head) * width
    token = tl.arange(0, TOKENS)[:, None]
    element = tl.arange(0, SIZE)[None, :]
    head_offset = head.to(tl.int64) * head_stride
    num_used = num_selected + tl.maximum(tl.cdiv(computed, block_size) - tail, 0)
    num_used = tl.minimum(num_used, width)
    num_copied = 0
    for index in range(0, num_used):
        in_tail = index >= num_selected
        logical = tail + index - num_selected
        wanted = tl.load(tl.where(in_tail, table + index, missing + index))
        is_changed = is_new | (logical >= first_changed) | (tl.load(held + index) != wanted)
        if tl.where(in_tail, is_changed, wanted != _NOTHING):
            block = ((wanted - head * per_head) // per_block).to(tl.int64)
            source = host + block * block_stride + head_offset
            target = pool + (slot * width + index) * block_stride + head_offset
            for start in range(0, block_size, TOKENS):
                within = (start + token) * token_stride + element
                mask = (start + token < block_size) & (element < token_size)
                tl.store(target + within, tl.load(source + within, mask=mask), mask=mask)
            is_partial = in_tail & ((logical + 1) * block_size > computed)
            tl.store(held + index, tl.where(is_partial, _NOTHING, wanted))
            num_copied += 1
    # The places that level 2 writes to hold no block of the host.
    for first in range(0, width, TOKENS):
        place = first + tl.arange(0, TOKENS)
        tl.store(held + place, _NOTHING, mask=(place >= num_used) & (place < width))
    tl.atomic_add(counters_ptr + NUM_POOL_BLOCKS, num_used.to(tl.int64))
    tl.atomic_add(counters_ptr + NUM_POOL_HITS, (num_used - num_copied).to(tl.int64))
    tl.atomic_add(counters_ptr + NUM_POOL_BYTES, (num_copied * block_bytes).to(tl.int64))


@triton.jit
def _note_exact_kernel(
    exact_ptr,  # [num_slots], written
    rows_ptr,  # the row table
    max_rows,
):
    row = tl.program_id(0)
    slot = row_value(rows_ptr, max_rows, row, SLOT)
    tl.store(exact_ptr + slot, row_value(rows_ptr, max_rows, row, COMPUTED))
