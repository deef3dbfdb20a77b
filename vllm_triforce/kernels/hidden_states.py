"""Copies of the target's hidden states from the ring of each slot to a pass."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.rows import Rows

_BLOCK = 512


def gather_states(
    rows: Rows,
    ring: torch.Tensor,  # [num_slots or more, capacity, hidden_size]
    query_len: int,
    padded_rows: int,
    out: torch.Tensor,  # [padded_rows * query_len, hidden_size], written
) -> None:
    """Gather the state before each of the newest ``query_len`` tokens of each row.

    States of padding rows are not written; tokens before the row's window get zeros.
    """
    hidden_size = ring.shape[2]
    grid = padded_rows * query_len, triton.cdiv(hidden_size, _BLOCK)
    _gather_kernel[grid](rows.table, ring, out, query_len, ring.shape[1], hidden_size, BLOCK=_BLOCK)


@triton.jit
def _gather_kernel(
    table_ptr,
    ring_ptr,
    out_ptr,
    query_len,
    capacity,
    hidden_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    row = token // query_len
    if row >= tl.load(table_ptr + col.NUM_ROWS):
        return
    row_ptr = table_ptr + row * col.ROW_STRIDE
    newest = tl.load(row_ptr + col.COMPUTED) + tl.load(row_ptr + col.LENGTH)
    position = newest - query_len + token % query_len
    in_window = (position >= 0) & (position + 1 >= tl.load(row_ptr + col.WINDOW_START))
    position = tl.where(in_window, position, 0)
    place = tl.load(row_ptr + col.SLOT).to(tl.int64) * capacity + position % capacity
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = number < hidden_size
    states = tl.load(ring_ptr + place * hidden_size + number, mask=mask & in_window, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * hidden_size + number, states, mask=mask)
