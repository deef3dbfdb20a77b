"""Copies of KV blocks from host memory: of a layer for the full pass, and of chunks for level 2."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.cache.one_head_blocks import ChunkIds
from vllm_triforce.kernels import counters as count
from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.nan_guard import NanScrubber, stored_type
from vllm_triforce.kernels.row_table import RowColumn, SlotColumn
from vllm_triforce.kernels.rows import Rows

# A few programs fill PCIe, and other kernels need the rest of the device.
_NUM_PROGRAMS = 32
_BLOCK = 4096
_CHUNK = tl.constexpr(8)  # places compared with all selected blocks at a time
_TOKENS = tl.constexpr(16)  # tokens copied at a time, in registers
_NOTHING = tl.constexpr(-1)


def stage_blocks(
    host: torch.Tensor,  # [num_blocks, ...], blocks contiguous and one after the other
    staging: torch.Tensor,  # the same shape and strides, on the device; written
    tables: torch.Tensor,  # [num_reqs, width], int32, block tables
    seq_lens: torch.Tensor,  # [num_reqs], int32, tokens that attention will read
    block_size: int,
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Copy each request's blocks, up to its length, to the same block ids of the staging buffer.

    The device reads the lengths, so a CUDA graph may hold the launch.
    """
    page = host.stride(0)
    # In words of 4 bytes, for any dtype of the cache.
    size = page * host.element_size() // 4
    _stage_blocks_kernel[(min(_NUM_PROGRAMS, tables.shape[1]),)](
        _as_words(host),
        _as_words(staging),
        size,
        tables,
        tables.stride(0),
        seq_lens,
        min(len(tables), len(seq_lens)),
        block_size,
        counters,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
    )


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """View the cache's memory from its first block on as int32."""
    flat = cache.as_strided((cache.shape[0] * cache.stride(0),), (1,))
    return flat.view(torch.int32)


@triton.jit(do_not_specialize=["num_reqs"])
def _stage_blocks_kernel(
    host_ptr,  # [num_blocks, page_size]
    staging_ptr,  # [num_blocks, page_size], written
    page_size,
    tables_ptr,  # [num_reqs, table_stride]
    table_stride,
    seq_lens_ptr,  # [num_reqs]
    num_reqs,
    block_size,
    counters_ptr,  # [num_counters], added to
    BLOCK: tl.constexpr,
):
    first, step = tl.program_id(0), tl.num_programs(0)
    staged_bytes = tl.zeros([], dtype=tl.int64)
    total = tl.zeros([], dtype=tl.int32)
    for row in range(0, num_reqs):
        num_blocks = tl.cdiv(tl.load(seq_lens_ptr + row), block_size)
        staged_bytes += num_blocks.to(tl.int64) * page_size * 4
        # Programs take the blocks of all requests in turn, because a request may have only one.
        for index in range((first + step - total % step) % step, num_blocks, step):
            block = tl.load(tables_ptr + row * table_stride + index).to(tl.int64) * page_size
            for start in range(0, page_size, BLOCK):
                places = start + tl.arange(0, BLOCK)
                mask = places < page_size
                words = tl.load(host_ptr + block + places, mask=mask)
                tl.store(staging_ptr + block + places, words, mask=mask)
        total += num_blocks
    if first == 0:
        tl.atomic_add(counters_ptr + count.NUM_STAGED_BYTES, staged_bytes)


class RetrievalPool:
    """Level 2's blocks of the host layers: ``width`` blocks on the device for each slot and layer.

    Each KV head has its own selected chunks, then the recent blocks and room for new tokens. A
    slot's blocks never move, so block tables depend on the slot alone. A selected block stays in
    its place for as long as it is selected: level 2 reads selected blocks in any order. Recent
    blocks are copied when a proposal begins, selected ones by the layer that has selected them.

    Args:
        hosts: KV cache of each host layer, [num_blocks, num_kv_heads, block_size, size].
        pools: one for each host layer, [num_slots * width, num_kv_heads, block_size, size], with
            the same strides.
        tables: [num_layers, max_rows * num_kv_heads, width], int32, one-head blocks of the KV cache
            that the rows read, of all layers that retrieve; the host layers are the last.
        chunk_ids: of ``tables``; a chunk is a KV block.
        max_selected: selected blocks of a row and head at most.
        selection: selects the blocks of any layer, as ``LayerSelection`` (``attention/base.py``).
        counters: [len(DeviceCounter)], int64, added to; it counts blocks of one head.
    """

    def __init__(
        self,
        hosts: list[torch.Tensor],
        pools: list[torch.Tensor],
        tables: torch.Tensor,
        chunk_ids: ChunkIds,
        max_selected: int,
        selection,
        counters: torch.Tensor,
        rows: Rows,
    ) -> None:
        num_blocks, num_heads, block_size, _ = pools[0].shape
        self.width = width = tables.shape[2]
        num_slots, device = num_blocks // width, counters.device
        self.num_layers = len(pools)
        self.first_layer = len(tables) - len(pools)
        """Index of the first host layer among the layers that retrieve."""
        self._rows, self._counters, self._selection = rows, counters, selection
        self.wanted = tables[self.first_layer :]
        """[num_layers, max_rows * num_kv_heads, width], one-head blocks that the rows read."""
        self._chunk_ids = chunk_ids
        self._max_selected = max_selected
        self._caches = hosts, pools  # keeps the memory at these addresses alive
        addresses = [[cache.data_ptr() for cache in caches] for caches in self._caches]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        held_shape = (num_slots, len(pools), num_heads, 2, width)
        self.held = torch.full(held_shape, -1, dtype=torch.int32, device=device)
        """By slot, layer and head: one-head blocks that the pool holds, and those to copy there."""
        blocks = torch.arange(num_blocks, dtype=torch.int32, device=device)
        self._block_tables = blocks.view(num_slots, width)
        heads = torch.arange(num_heads, dtype=torch.int32, device=device)
        self._slot_tables = chunk_ids.of(self._block_tables[:, None], heads[:, None])
        """[num_slots, num_kv_heads, width], one-head blocks."""
        self.tables = torch.zeros(
            rows.max_rows * num_heads, width, dtype=torch.int32, device=device
        )
        """[max_rows * num_kv_heads, width], one-head blocks of each row's slot, for any layer."""
        num_tokens = rows.max_rows * (rows.gamma + 1)
        self.slot_mapping = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        """[max_rows * (gamma + 1)], slots of level 2's tokens in the pool; -1 is padding."""
        self._scrubber = NanScrubber(pools, block_size, device)

    def begin(self) -> None:
        """Copy newly written blocks at the beginning of a proposal."""
        rows, (_, _, num_heads, _, width) = self._rows, self.held.shape
        self._copy(_begin_pool_kernel, 0, self.num_layers, rows.num_rows)
        slots = rows.column(RowColumn.SLOT).long()
        num_exact = rows.table[:, SlotColumn.NUM_EXACT]
        num_exact.index_copy_(0, slots, rows.computed[: rows.num_rows])
        row_tables = self.tables.view(rows.max_rows, num_heads, width)
        torch.index_select(self._slot_tables, 0, slots, out=row_tables[: rows.num_rows])

    def select(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows * (gamma + 1), num_heads, head_dim]
    ) -> torch.Tensor | None:
        """Select a layer's blocks, and copy those of a host layer."""
        by_head = self._selection.select(layer, query)
        if (host_layer := layer - self.first_layer) >= 0:
            num_rows = len(query) // (self._rows.gamma + 1)
            selected = triton.next_power_of_2(max(1, self._max_selected))
            self._copy(_copy_selected_kernel, host_layer, 1, num_rows, SELECTED=selected)
        return by_head

    def _copy(self, kernel, first_layer: int, num_layers: int, num_rows: int, **constants) -> None:
        like, num_heads = self._caches[0][0], self.held.shape[2]
        block_stride, _, token_stride, _ = like.stride()
        kernel[(num_layers, num_rows, num_heads)](
            self._rows.table,
            self.wanted,
            self.wanted.stride(0),
            self.held,
            self.width,
            first_layer,
            self.num_layers,
            self._addresses,
            self._counters,
            *self._chunk_ids[:2],
            block_stride // self._chunk_ids.per_block,
            token_stride,
            *like.shape[2:],
            TYPE=stored_type(like.dtype),
            SIZE=triton.next_power_of_2(like.shape[3]),
            **constants,
        )

    def clean(self) -> None:
        """Scrub NaN from flagged rows' blocks, before other requests get the slots."""
        tables = self._block_tables[self._rows.column(RowColumn.SLOT).long()]
        self._scrubber(self._rows, tables, None)


@triton.jit
def _copy_selected_kernel(
    rows_ptr,  # the row table
    tables_ptr,  # [num_host_layers, max_rows * num_heads, width], one-head blocks in host memory
    table_layer_stride,
    held_ptr,  # [num_slots, num_host_layers, num_heads, 2, width]; updated
    width,
    first_layer,  # of this launch
    num_layers,  # host layers
    addresses_ptr,  # [2, num_host_layers], int64, of caches in host memory and pools
    counters_ptr,  # [num_counters], added to
    per_block,
    per_head,
    one_head_stride,  # from one-head block to one-head block, in elements
    token_stride,
    block_size,
    token_size,
    TYPE: tl.constexpr,
    SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
):
    # held     5  9  3    blocks in the pool's places, of which 9 is not wanted any more
    # wanted   3  7  5    in the order of the sparse table
    # missing  -  7  -    written: the first missing block goes to the first free place
    layer = first_layer + tl.program_id(0)
    row = tl.program_id(1)
    head, num_heads = tl.program_id(2), tl.num_programs(2)
    row_ptr = rows_ptr + row * col.ROW_STRIDE
    slot = tl.load(row_ptr + col.SLOT).to(tl.int64)
    # A row that does not propose has the first blocks in its table: its pool keeps what it has.
    proposes = tl.load(row_ptr + col.LENGTH) < tl.load(row_ptr + col.ROOM)
    num_selected = tl.where(proposes, tl.load(row_ptr + col.NUM_SELECTED), 0)
    held = held_ptr + ((slot * num_layers + layer) * num_heads + head) * 2 * width
    missing = held + width
    table = tables_ptr + layer.to(tl.int64) * table_layer_stride
    table += (row * num_heads + head) * width
    index = tl.arange(0, SELECTED)
    wanted = tl.load(table + index, mask=index < num_selected, other=_NOTHING)
    is_held = tl.zeros([SELECTED], dtype=tl.int32)
    for start in range(0, num_selected, _CHUNK):
        place = start + tl.arange(0, _CHUNK)
        held_block = tl.load(held + place, mask=place < num_selected, other=_NOTHING)
        same = (held_block[:, None] == wanted[None, :]) & (held_block[:, None] != _NOTHING)
        is_held = tl.maximum(is_held, tl.max(same.to(tl.int32), axis=0))
    # The n-th missing block goes to the n-th place whose block is not wanted.
    is_missing = (index < num_selected) & (is_held == 0)
    nth_missing = tl.where(is_missing, tl.cumsum(is_missing.to(tl.int32), axis=0), 0)
    num_free = 0
    for start in range(0, num_selected, _CHUNK):
        place = start + tl.arange(0, _CHUNK)
        mask = place < num_selected
        held_block = tl.load(held + place, mask=mask, other=_NOTHING)
        same = (held_block[:, None] == wanted[None, :]) & (held_block[:, None] != _NOTHING)
        is_free = mask & (tl.max(same.to(tl.int32), axis=1) == 0)
        nth = num_free + tl.cumsum(is_free.to(tl.int32), axis=0)
        num_free += tl.sum(is_free.to(tl.int32))
        is_target = is_free[:, None] & (nth[:, None] == nth_missing[None, :])
        block = tl.sum(tl.where(is_target, wanted[None, :], 0), axis=1)
        tl.store(missing + place, tl.where(is_free, block, _NOTHING), mask=mask)
    tl.debug_barrier()  # the blocks below are read by other threads
    host = tl.load(addresses_ptr + layer).to(tl.pointer_type(TYPE))
    pool = tl.load(addresses_ptr + num_layers + layer).to(tl.pointer_type(TYPE))
    for index in range(0, num_selected):
        block = tl.load(missing + index)
        if block != _NOTHING:
            source = host + block.to(tl.int64) * one_head_stride
            place = (slot * width + index) * per_block + head * per_head
            target = pool + place * one_head_stride
            _copy_block(target, source, token_stride, block_size, token_size, SIZE)
            tl.store(held + index, block)
    _count_blocks(counters_ptr, num_selected, num_free, block_size * token_size, TYPE)


@triton.jit
def _begin_pool_kernel(
    rows_ptr,  # the row table
    tables_ptr,  # [num_host_layers, max_rows * num_heads, width], one-head blocks in host memory
    table_layer_stride,
    held_ptr,  # [num_slots, num_host_layers, num_heads, 2, width]; updated
    width,
    first_layer,  # 0
    num_layers,
    addresses_ptr,  # [2, num_host_layers], int64, of caches in host memory and pools
    counters_ptr,  # [num_counters], added to
    per_block,
    per_head,
    one_head_stride,
    token_stride,
    block_size,
    token_size,
    TYPE: tl.constexpr,
    SIZE: tl.constexpr,
):
    # A slot's places with 3 selected blocks, blocks of 16, 195 tokens and the tail from block 10:
    #     place   0 1 2      3   4   5          6 ... width - 1
    #     block   selected   10  11  12         none: level 2 writes its own tokens there
    #                                (partly filled, so copied again next time)
    layer = first_layer + tl.program_id(0)
    row = tl.program_id(1)
    head, num_heads = tl.program_id(2), tl.num_programs(2)
    row_ptr = rows_ptr + row * col.ROW_STRIDE
    slot = tl.load(row_ptr + col.SLOT).to(tl.int64)
    is_new = tl.load(row_ptr + col.OWNER) == col.NEW_OWNER
    computed = tl.load(row_ptr + col.COMPUTED)
    tail = tl.load(row_ptr + col.TAIL)
    num_selected = tl.load(row_ptr + col.NUM_SELECTED)
    first_changed = tl.load(rows_ptr + slot * col.ROW_STRIDE + col.NUM_EXACT) // block_size
    host = tl.load(addresses_ptr + layer).to(tl.pointer_type(TYPE))
    pool = tl.load(addresses_ptr + num_layers + layer).to(tl.pointer_type(TYPE))
    table = tables_ptr + layer.to(tl.int64) * table_layer_stride
    table += (row * num_heads + head) * width
    held = held_ptr + ((slot * num_layers + layer) * num_heads + head) * 2 * width
    num_used = num_selected + tl.maximum(tl.cdiv(computed, block_size) - tail, 0)
    num_used = tl.minimum(num_used, width)
    num_copied = 0
    for index in range(num_selected, num_used):
        logical = tail + index - num_selected
        wanted = tl.load(table + index)
        is_changed = is_new | (logical >= first_changed) | (tl.load(held + index) != wanted)
        if is_changed:
            tl.debug_barrier()  # a thread that is late would read what is stored below
            source = host + wanted.to(tl.int64) * one_head_stride
            block = (slot * width + index) * per_block + head * per_head
            target = pool + block * one_head_stride
            _copy_block(target, source, token_stride, block_size, token_size, SIZE)
            is_partial = (logical + 1) * block_size > computed
            tl.store(held + index, tl.where(is_partial, _NOTHING, wanted))
            num_copied += 1
    # The places that level 2 writes to hold no block of the host, and a new owner's hold none yet.
    first_empty = tl.where(is_new, 0, num_used)
    for first in range(0, width, _TOKENS):
        place = first + tl.arange(0, _TOKENS)
        is_empty = (place >= first_empty) & ((place < num_selected) | (place >= num_used))
        tl.store(held + place, _NOTHING, mask=is_empty & (place < width))
    num_tail = num_used - num_selected
    _count_blocks(counters_ptr, num_tail, num_copied, block_size * token_size, TYPE)


@triton.jit
def _copy_block(
    target,
    source,
    token_stride,
    block_size,
    token_size,
    SIZE: tl.constexpr,
):
    """Copy a block of one head, ``block_size`` tokens of ``token_size`` elements."""
    token = tl.arange(0, _TOKENS)[:, None]
    element = tl.arange(0, SIZE)[None, :]
    for start in range(0, block_size, _TOKENS):
        within = (start + token) * token_stride + element
        mask = (start + token < block_size) & (element < token_size)
        tl.store(target + within, tl.load(source + within, mask=mask), mask=mask)


@triton.jit
def _count_blocks(counters_ptr, num_used, num_copied, block_elements, TYPE: tl.constexpr):
    """Count blocks that level 2 reads from the pool, and those of them that were copied."""
    tl.atomic_add(counters_ptr + count.NUM_POOL_BLOCKS, num_used.to(tl.int64))
    tl.atomic_add(counters_ptr + count.NUM_POOL_HITS, (num_used - num_copied).to(tl.int64))
    num_bytes = num_copied * block_elements * (TYPE.primitive_bitwidth // 8)
    tl.atomic_add(counters_ptr + count.NUM_POOL_BYTES, num_bytes.to(tl.int64))
