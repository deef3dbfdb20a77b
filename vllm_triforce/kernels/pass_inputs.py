"""Inputs of the models' passes, made on the device from tokens that the host does not know.

Here and in the other kernels, a number that differs from step to step is not specialized on. Triton
would compile anew, while requests wait, for 1, for multiples of 16 and for others.
"""

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.rows import Rows

if TYPE_CHECKING:
    from vllm_triforce.kernels.offload import RetrievalPool


class PassInputs:
    """Inputs of a model's pass, ``query_len`` tokens for each row.

    Args:
        hidden: size and dtype of the hidden states that a head reads beside the tokens.

    ``position_deltas`` are M-RoPE positions of a target minus ``positions``.
    """

    def __init__(
        self,
        max_rows: int,
        query_len: int,
        num_seqs: int,
        device,
        hidden: tuple[int, torch.dtype] | None = None,
    ) -> None:
        num_tokens = max_rows * query_len
        self.query_len = query_len
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.position_deltas = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((num_seqs,), query_len, dtype=torch.int32, device=device)
        self.hidden: torch.Tensor | None = None
        if hidden is not None:
            size, dtype = hidden
            self.hidden = torch.zeros(num_tokens, size, dtype=dtype, device=device)


def prepare_window_inputs(
    rows: Rows,
    inputs: PassInputs,  # written
    padded_rows: int,
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32
    num_sinks: int,
    capacity: int,  # tokens of a window
    tokens_per_slot: int,  # of a slot's blocks in the draft's cache, which are consecutive
) -> None:
    """Prepare the newest ``inputs.query_len`` tokens of each row, at their places in its window."""
    _window_inputs_kernel[(padded_rows,)](
        rows.table,
        all_token_ids,
        all_token_ids.stride(0),
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        num_sinks,
        capacity,
        tokens_per_slot,
        inputs.query_len,
        PADDED_LEN=triton.next_power_of_2(inputs.query_len),
    )


def prepare_draft_inputs(
    rows: Rows,
    inputs: PassInputs,  # written; its lengths are those of the pass before
    padded_rows: int,
    step: int,
    capacity: int,  # as above
    tokens_per_slot: int,
) -> None:
    """Prepare level 1's newest token of each row, after the tokens of the pass before."""
    _draft_inputs_kernel[(padded_rows,)](
        rows.table,
        step,
        inputs.seq_lens,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        capacity,
        tokens_per_slot,
    )


def prepare_target_inputs(
    rows: Rows,
    inputs: PassInputs,  # written; ``seq_lens`` has one per KV head
    padded_rows: int,
    tables: torch.Tensor,  # [num_rows, table_width], int32
    dense_seq_lens: torch.Tensor,  # [max_rows], int32, written
    block_size: int,
    max_position: int,
    pool: "RetrievalPool | None" = None,  # its slot mapping is written
) -> None:
    """Prepare the newest token of each row and its drafts, for level 2."""
    _target_inputs_kernel[(padded_rows,)](
        rows.table,
        rows.gamma,
        tables,
        tables.stride(0),
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        dense_seq_lens,
        inputs.slot_mapping if pool is None else pool.slot_mapping,
        block_size,
        max_position,
        NUM_KV_HEADS=len(inputs.seq_lens) // len(dense_seq_lens),
        POOL_WIDTH=0 if pool is None else pool.width,
        PADDED_LEN=triton.next_power_of_2(rows.gamma + 1),
    )


@triton.jit
def token_at(known_tokens, row_ptr, computed, index):
    """Load token ``index`` of a request: one that vLLM knows, or one of the proposal."""
    known_id = tl.load(known_tokens + index, mask=(index >= 0) & (index <= computed))
    place = index - computed - 1
    proposed = tl.load(row_ptr + col.PROPOSED + place, mask=place >= 0)
    return tl.where(index > computed, proposed, known_id)


@triton.jit
def _window_inputs_kernel(
    table_ptr,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    token_stride,
    input_ids_ptr,  # [padded rows * query_len], written, as are the three below
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,  # [padded rows]
    num_sinks,
    capacity,
    tokens_per_slot,
    query_len,
    PADDED_LEN: tl.constexpr,
):
    # With 4 sinks, a window from token 100 on, the newest token 107 and query_len 3:
    #     index      105  106  107   of the request
    #     position     9   10   11   4 sinks, then 100, 101, ... from position 4 on
    #     place      slot * tokens_per_slot + position;  seq_len 12
    row = tl.program_id(0)
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    row_ptr = table_ptr + row * col.ROW_STRIDE
    is_used = row < tl.load(table_ptr + col.NUM_ROWS)
    state = tl.load(row_ptr + col.STATE).to(tl.int64)
    start = tl.load(row_ptr + col.WINDOW_START)
    computed = tl.load(row_ptr + col.COMPUTED)
    newest = computed + tl.load(row_ptr + col.LENGTH)
    index = newest - query_len + 1 + j
    position = tl.where(index < num_sinks, index, num_sinks + index - start)
    in_window = (index >= 0) & ((index < num_sinks) | (index >= start)) & (position < capacity)
    in_window = in_window & mask & is_used
    known_tokens = all_token_ids_ptr + state * token_stride
    token = token_at(known_tokens, row_ptr, computed, tl.where(in_window, index, 0))
    place = (tl.load(row_ptr + col.SLOT) * tokens_per_slot + position).to(tl.int64)
    tl.store(input_ids_ptr + out, tl.where(in_window, token, 0), mask=mask)
    tl.store(positions_ptr + out, tl.where(in_window, position, 0).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(in_window, place, -1), mask=mask)
    seq_len = tl.where(newest < num_sinks, newest, num_sinks + newest - start) + 1
    seq_len = tl.minimum(tl.maximum(seq_len, query_len), capacity)
    tl.store(seq_lens_ptr + row, tl.where(is_used, seq_len, query_len))


@triton.jit(do_not_specialize=["step"])
def _draft_inputs_kernel(
    table_ptr,
    step,
    seq_lens_ptr,  # [padded rows], of the pass before; updated
    input_ids_ptr,  # [padded rows], written
    positions_ptr,
    slot_mapping_ptr,
    capacity,
    tokens_per_slot,
):
    row = tl.program_id(0)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    is_used = row < tl.load(table_ptr + col.NUM_ROWS)
    position = tl.load(seq_lens_ptr + row)
    fits = is_used & (position < capacity)
    position = tl.where(is_used, tl.minimum(position, capacity - 1), 0)
    place = (tl.load(row_ptr + col.SLOT) * tokens_per_slot + position).to(tl.int64)
    draft = tl.load(row_ptr + col.DRAFTED + step - 1, mask=is_used, other=0)
    tl.store(input_ids_ptr + row, draft)
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(slot_mapping_ptr + row, tl.where(fits, place, -1))
    tl.store(seq_lens_ptr + row, position + 1)


@triton.jit
def _target_inputs_kernel(
    table_ptr,  # the drafts of a row are cut to its room
    gamma,
    tables_ptr,  # [num_rows, table_width]
    table_stride,
    input_ids_ptr,  # [padded rows * (gamma + 1)], written, as are all below
    positions_ptr,
    slot_mapping_ptr,
    sparse_seq_lens_ptr,  # [padded rows * NUM_KV_HEADS]
    dense_seq_lens_ptr,  # [padded rows]
    pool_mapping_ptr,  # [padded rows * (gamma + 1)], as slot_mapping, in the pool of the row's slot
    block_size,
    max_position,
    NUM_KV_HEADS: tl.constexpr,
    POOL_WIDTH: tl.constexpr,  # blocks of a slot; 0 without a pool
    PADDED_LEN: tl.constexpr,
):
    # With gamma 2, 40 tokens computed, a proposal of one token so far, blocks of 16, the tail from
    # block 2 on, and one selected block of the two before it (16 tokens skipped):
    #     j          0        1        2
    #     token      newest   draft 0  draft 1
    #     position   41       42       43     in block 2; block 1 of the sparse table and the pool
    #     seq_len    44 dense, 28 sparse
    row = tl.program_id(0)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    query_len = gamma + 1
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    sparse_seq_lens_ptr += row * NUM_KV_HEADS
    computed = tl.load(row_ptr + col.COMPUTED)
    length = tl.load(row_ptr + col.LENGTH)
    missing = tl.load(row_ptr + col.ROOM) - length
    # Other rows, finished ones and padding, write no KV.
    is_open = (row < tl.load(table_ptr + col.NUM_ROWS)) & (missing > 0)
    # The pass adds a token, so one less is drafted.
    num_drafted = tl.minimum(tl.load(row_ptr + col.NUM_DRAFTED), tl.where(is_open, missing - 1, 0))
    tl.store(row_ptr + col.NUM_DRAFTED, num_drafted)
    newest = tl.load(row_ptr + col.PROPOSED + length - 1, mask=length > 0)
    newest = tl.where(length > 0, newest, tl.load(row_ptr + col.LAST_TOKEN))
    draft = tl.load(row_ptr + col.DRAFTED + j - 1, mask=(j > 0) & (j <= num_drafted), other=0)
    token = tl.where(j == 0, newest, draft)
    position = computed + length + j
    valid = mask & is_open & (j <= num_drafted)
    block = tl.load(tables_ptr + row * table_stride + position // block_size, mask=valid, other=0)
    place = block.to(tl.int64) * block_size + position % block_size
    tl.store(input_ids_ptr + out, tl.where(is_open, token, 0), mask=mask)
    position_fed = tl.where(is_open, tl.minimum(position, max_position), 0)
    tl.store(positions_ptr + out, position_fed.to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(valid, place, -1), mask=mask)
    not_read = tl.load(row_ptr + col.TAIL) - tl.load(row_ptr + col.NUM_SELECTED)
    if POOL_WIDTH:
        index = position // block_size - not_read
        fits = valid & (index < POOL_WIDTH)
        index += tl.load(row_ptr + col.SLOT) * POOL_WIDTH
        place = index.to(tl.int64) * block_size + position % block_size
        tl.store(pool_mapping_ptr + out, tl.where(fits, place, -1), mask=mask)
    seq_len = tl.where(is_open, computed + length, 0) + query_len
    sparse_seq_len = seq_len - tl.where(is_open, not_read * block_size, 0)
    for head in tl.static_range(NUM_KV_HEADS):
        tl.store(sparse_seq_lens_ptr + head, sparse_seq_len)
    tl.store(dense_seq_lens_ptr + row, seq_len)
