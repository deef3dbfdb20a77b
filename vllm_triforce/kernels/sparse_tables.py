"""Block tables of level 2's one-head sequences, for all layers, heads and requests."""

import torch
from vllm.triton_utils import tl, triton


@triton.jit
def _sparse_tables_kernel(
    out_ptr,  # [num_layers, max_reqs * num_kv_heads, width]
    out_layer_stride,
    selected_ptr,  # [num_slots, num_layers, num_kv_heads, max_selected]
    max_selected,
    slots_ptr,  # [num_reqs]
    num_selected_ptr,  # [num_reqs]
    tail_start_ptr,  # [num_reqs]
    num_blocks_ptr,  # [num_reqs]
    tables_ptr,  # [num_reqs, table_width]
    table_stride,
    width,
    per_block,
    per_head,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    num_heads, num_layers = tl.num_programs(1), tl.num_programs(2)
    num_selected = tl.load(num_selected_ptr + row)
    tail_start = tl.load(tail_start_ptr + row)
    num_blocks = tl.load(num_blocks_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    selected = selected_ptr + ((slot * num_layers + layer) * num_heads + head) * max_selected
    out = out_ptr + layer * out_layer_stride + (row * num_heads + head) * width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_selected = column < num_selected
        logical = tail_start + column - num_selected
        in_tail = (column >= num_selected) & (logical < num_blocks)
        block = tl.load(selected + column, mask=is_selected, other=0)
        block += tl.load(tables_ptr + row * table_stride + logical, mask=in_tail, other=0)
        # Beyond what is allocated stands vLLM's null block; no sequence reaches it.
        tl.store(out + column, block * per_block + head * per_head, mask=column < width)


def build_sparse_tables(
    out: torch.Tensor,  # [num_layers, max_reqs * num_kv_heads, width], int32, written
    selected: torch.Tensor,  # [num_slots, num_layers, num_kv_heads, max_selected], int32
    slots: torch.Tensor,  # [num_reqs], int32, each request's row of selected
    num_selected: torch.Tensor,  # [num_reqs], int32
    tail_start: torch.Tensor,  # [num_reqs], int32, first logical block of the tail
    num_blocks: torch.Tensor,  # [num_reqs], int32, blocks that are allocated
    tables: torch.Tensor,  # [num_reqs, table_width], int32, block tables
    head_strides: tuple[int, int],  # see cache/one_head_blocks.py
) -> None:
    """Each table is the selected blocks and then the tail: recent blocks and all after them."""
    num_layers, num_heads = selected.shape[1:3]
    width = out.shape[2]
    _sparse_tables_kernel[(len(tables), num_heads, num_layers)](
        out,
        out.stride(0),
        selected,
        selected.shape[3],
        slots,
        num_selected,
        tail_start,
        num_blocks,
        tables,
        tables.stride(0),
        width,
        *head_strides,
        BLOCK=min(1024, triton.next_power_of_2(width)),
    )
