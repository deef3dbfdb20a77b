"""Level 2's pool of layers in host memory: what each row reads there is brought to the device."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.faults import stored_type
from vllm_triforce.kernels.row_metadata import NEW_OWNER, REFRESH, SLOT, row_value
from vllm_triforce.kernels.rows import Rows


@triton.jit
def _refill_pool_kernel(
    hosts_ptr,  # [num_host_layers], int64, addresses
    pools_ptr,  # [num_host_layers], int64, addresses
    tables_ptr,  # [num_layers, max_rows * num_heads, width], one-head blocks in host memory
    table_layer_stride,
    first_layer,
    held_ptr,  # [num_host_layers, num_slots, num_heads, width], what the pool has; written
    num_slots,
    exact_ptr,  # [num_slots], tokens up to which the pool's tail is exact
    row_metadata_ptr,
    computed_ptr,  # [num_rows]
    tail_ptr,  # [num_rows]
    num_selected_ptr,  # [num_rows]
    width,
    block_size,
    per_block,
    per_head,
    block_stride,
    head_stride,
    token_stride,
    token_size,
    TYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    layer = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    num_heads = tl.num_programs(2)
    slot = row_value(row_metadata_ptr, row, SLOT).to(tl.int64)
    is_new = row_value(row_metadata_ptr, row, REFRESH) == NEW_OWNER
    computed = tl.load(computed_ptr + row)
    tail = tl.load(tail_ptr + row)
    num_selected = tl.load(num_selected_ptr + row)
    first_changed = tl.load(exact_ptr + slot) // block_size
    host = tl.load(hosts_ptr + layer).to(tl.pointer_type(TYPE))
    pool = tl.load(pools_ptr + layer).to(tl.pointer_type(TYPE))
    table = tables_ptr + (first_layer + layer).to(tl.int64) * table_layer_stride
    table += (row * num_heads + head) * width
    held = held_ptr + ((layer * num_slots + slot) * num_heads + head) * width
    token = tl.arange(0, TOKENS)[:, None]
    number = tl.arange(0, SIZE)[None, :]
    mask = (token < block_size) & (number < token_size)
    within = head.to(tl.int64) * head_stride + token * token_stride + number
    num_used = num_selected + tl.maximum(tl.cdiv(computed, block_size) - tail, 0)
    for index in range(0, tl.minimum(num_used, width)):
        wanted = tl.load(table + index)
        logical = tail + index - num_selected
        is_changed = (index >= num_selected) & (logical >= first_changed)
        if is_new | is_changed | (tl.load(held + index) != wanted):
            block = ((wanted - head * per_head) // per_block).to(tl.int64)
            found = tl.load(host + block * block_stride + within, mask=mask)
            to = (slot * width + index) * block_stride
            tl.store(pool + to + within, found, mask=mask)
            tl.store(held + index, wanted)


class PoolRefill:
    """Brings to the pool what is not there yet, of the rows that go through the levels.

    Args:
        hosts, pools: of each layer in host memory, [num_blocks, num_kv_heads, block_size, size]
            and [num_slots * width, ...]; both laid out alike.
        first_layer: of those, among the layers that retrieve.
        head_strides: how tables name one head's block (``cache/one_head_blocks.py``).
    """

    def __init__(
        self,
        hosts: list[torch.Tensor],
        pools: list[torch.Tensor],
        first_layer: int,
        num_slots: int,
        width: int,
        head_strides: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._caches = hosts, pools  # they must live as long as their addresses are used
        self._hosts, self._pools = (
            torch.tensor([its.data_ptr() for its in caches], dtype=torch.int64, device=device)
            for caches in (hosts, pools)
        )
        self._first_layer = first_layer
        self._head_strides = head_strides
        shape = (len(hosts), num_slots, hosts[0].shape[1], width)
        self.held = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.exact = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def __call__(self, rows: Rows, tables: torch.Tensor) -> None:
        """
        Args:
            tables: [num_layers, max_rows * num_kv_heads, width], int32, as laid out for the rows.
        """
        num_layers, num_slots, num_heads, width = self.held.shape
        first = self._caches[0][0]
        block_stride, head_stride, token_stride, _ = first.stride()
        _, _, block_size, size = first.shape
        _refill_pool_kernel[(num_layers, rows.num_rows, num_heads)](
            self._hosts,
            self._pools,
            tables,
            tables.stride(0),
            self._first_layer,
            self.held,
            num_slots,
            self.exact,
            rows.row_metadata,
            rows.computed,
            rows.tail,
            rows.num_selected,
            width,
            block_size,
            *self._head_strides,
            block_stride,
            head_stride,
            token_stride,
            size,
            TYPE=stored_type(first.dtype),
            TOKENS=triton.next_power_of_2(block_size),
            SIZE=triton.next_power_of_2(size),
        )
        _note_exact_kernel[(rows.num_rows,)](self.exact, rows.row_metadata, rows.computed)


@triton.jit
def _note_exact_kernel(
    exact_ptr,  # [num_slots], written
    row_metadata_ptr,
    computed_ptr,  # [num_rows]
):
    row = tl.program_id(0)
    slot = row_value(row_metadata_ptr, row, SLOT)
    tl.store(exact_ptr + slot, tl.load(computed_ptr + row))
