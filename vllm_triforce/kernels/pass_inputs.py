"""Inputs of the models' passes, made on the device from tokens that the host does not know.

Here and in the other kernels: a number that differs from step to step is not specialized on. Triton
would compile anew, while requests wait, for 1, for multiples of 16 and for others.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.row_table import SLOT, STATE, WINDOW_START, row_value


class PassInputs:
    """Inputs of a model's pass, ``query_len`` tokens for each row."""

    def __init__(self, max_rows: int, query_len: int, num_seqs: int, device) -> None:
        num_tokens = max_rows * query_len
        self.query_len = query_len
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((num_seqs,), query_len, dtype=torch.int32, device=device)


@triton.jit
def token_at(all_token_ids, state_row, proposal_row, computed, index):
    """Token ``index`` of a request: one that vLLM knows, or one of the proposal."""
    known = tl.load(all_token_ids + state_row + index, mask=(index >= 0) & (index <= computed))
    proposed = tl.load(proposal_row + index - computed - 1, mask=index > computed)
    return tl.where(index > computed, proposed.to(tl.int32), known)


@triton.jit
def prepare_window_inputs_kernel(
    row_metadata_ptr,  # [padded rows, NUM_COLUMNS]
    num_rows_ptr,  # [1]
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    token_stride,
    proposal_ptr,  # [padded rows, num_speculative_tokens]
    num_speculative_tokens,
    computed_ptr,
    length_ptr,
    input_ids_ptr,  # [padded rows * query_len], written, as are the three below
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,  # [padded rows]
    num_sinks,
    capacity,
    block_size,
    blocks_per_slot,
    query_len,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0)
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    if row >= tl.load(num_rows_ptr):
        tl.store(input_ids_ptr + out, 0, mask=mask)
        tl.store(positions_ptr + out, 0, mask=mask)
        tl.store(slot_mapping_ptr + out, -1, mask=mask)
        tl.store(seq_lens_ptr + row, query_len)
        return
    state = row_value(row_metadata_ptr, row, STATE).to(tl.int64)
    slot = row_value(row_metadata_ptr, row, SLOT)
    start = row_value(row_metadata_ptr, row, WINDOW_START)
    computed = tl.load(computed_ptr + row)
    newest = computed + tl.load(length_ptr + row)
    index = newest - query_len + 1 + j
    position = tl.where(index < num_sinks, index, num_sinks + index - start)
    in_window = (index >= 0) & ((index < num_sinks) | (index >= start)) & (position < capacity)
    in_window = in_window & mask
    token = token_at(
        all_token_ids_ptr,
        state * token_stride,
        proposal_ptr + row * num_speculative_tokens,
        computed,
        tl.where(in_window, index, 0),
    )
    block = slot * blocks_per_slot + position // block_size
    place = (block * block_size + position % block_size).to(tl.int64)
    tl.store(input_ids_ptr + out, tl.where(in_window, token, 0), mask=mask)
    tl.store(positions_ptr + out, tl.where(in_window, position, 0).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(in_window, place, -1), mask=mask)
    seq_len = tl.where(newest < num_sinks, newest, num_sinks + newest - start) + 1
    tl.store(seq_lens_ptr + row, tl.minimum(tl.maximum(seq_len, query_len), capacity))


@triton.jit(do_not_specialize=["step"])
def prepare_draft_inputs_kernel(
    row_metadata_ptr,  # [padded rows, NUM_COLUMNS]
    num_rows_ptr,  # [1]
    drafted_ptr,  # [padded rows, gamma]
    gamma,
    step,
    seq_lens_ptr,  # [padded rows], of the pass before; updated
    input_ids_ptr,  # [padded rows], written
    positions_ptr,
    slot_mapping_ptr,
    capacity,
    block_size,
    blocks_per_slot,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        tl.store(input_ids_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slot_mapping_ptr + row, -1)
        tl.store(seq_lens_ptr + row, 1)
        return
    position = tl.load(seq_lens_ptr + row)
    fits = position < capacity
    position = tl.minimum(position, capacity - 1)
    slot = row_value(row_metadata_ptr, row, SLOT)
    block = slot * blocks_per_slot + position // block_size
    place = (block * block_size + position % block_size).to(tl.int64)
    tl.store(input_ids_ptr + row, tl.load(drafted_ptr + row * gamma + step - 1))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(slot_mapping_ptr + row, tl.where(fits, place, -1))
    tl.store(seq_lens_ptr + row, position + 1)


@triton.jit
def prepare_target_inputs_kernel(
    row_metadata_ptr,  # [padded rows, NUM_COLUMNS]
    num_rows_ptr,  # [1]
    tables_ptr,  # [num_rows, table_width]
    table_stride,
    proposal_ptr,  # [padded rows, num_speculative_tokens]
    num_speculative_tokens,
    drafted_ptr,  # [padded rows, gamma]
    num_drafted_ptr,  # [padded rows]; lowered to what there is room for
    computed_ptr,
    length_ptr,
    room_ptr,
    last_token_ptr,
    skipped_ptr,
    input_ids_ptr,  # [padded rows * (gamma + 1)], written, as are all below
    positions_ptr,
    slot_mapping_ptr,
    sparse_seq_lens_ptr,  # [padded rows * num_kv_heads]
    dense_seq_lens_ptr,  # [padded rows]
    token_positions_ptr,  # [padded rows]
    pool_mapping_ptr,  # [padded rows * (gamma + 1)], as slot_mapping, in the pool of the row's slot
    tail_ptr,
    num_selected_ptr,
    pool_width,  # blocks of a slot
    block_size,
    max_position,
    num_kv_heads,
    gamma,
    HAS_POOL: tl.constexpr,
    PADDED_LEN: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
):
    row = tl.program_id(0)
    query_len = gamma + 1
    j = tl.arange(0, PADDED_LEN)
    mask = j < query_len
    out = row * query_len + j
    heads = tl.arange(0, PADDED_HEADS)
    seq_lens = sparse_seq_lens_ptr + row * num_kv_heads + heads
    computed = tl.load(computed_ptr + row)
    length = tl.load(length_ptr + row)
    missing = tl.load(room_ptr + row) - length
    if (row >= tl.load(num_rows_ptr)) | (missing <= 0):
        tl.store(num_drafted_ptr + row, 0)
        tl.store(input_ids_ptr + out, 0, mask=mask)
        tl.store(positions_ptr + out, 0, mask=mask)
        tl.store(slot_mapping_ptr + out, -1, mask=mask)
        tl.store(seq_lens, query_len, mask=heads < num_kv_heads)
        tl.store(dense_seq_lens_ptr + row, query_len)
        if HAS_POOL:
            tl.store(pool_mapping_ptr + out, -1, mask=mask)
        return
    # The pass adds a token of its own, hence one less to draft.
    drafted = tl.minimum(tl.load(num_drafted_ptr + row), missing - 1)
    tl.store(num_drafted_ptr + row, drafted)
    newest = tl.load(proposal_ptr + row * num_speculative_tokens + length - 1, mask=length > 0)
    newest = tl.where(length > 0, newest.to(tl.int32), tl.load(last_token_ptr + row))
    is_draft = (j > 0) & (j <= drafted)
    draft = tl.load(drafted_ptr + row * gamma + j - 1, mask=is_draft, other=0)
    position = computed + length + j
    valid = mask & (j <= drafted)
    block = tl.load(tables_ptr + row * table_stride + position // block_size, mask=valid, other=0)
    place = block.to(tl.int64) * block_size + position % block_size
    tl.store(input_ids_ptr + out, tl.where(j == 0, newest, draft), mask=mask)
    tl.store(positions_ptr + out, tl.minimum(position, max_position).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + out, tl.where(valid, place, -1), mask=mask)
    if HAS_POOL:
        index = tl.load(num_selected_ptr + row) + position // block_size - tl.load(tail_ptr + row)
        fits = valid & (index < pool_width)
        index += row_value(row_metadata_ptr, row, SLOT) * pool_width
        place = index.to(tl.int64) * block_size + position % block_size
        tl.store(pool_mapping_ptr + out, tl.where(fits, place, -1), mask=mask)
    seq_len = computed + length + query_len
    sparse = seq_len - tl.load(skipped_ptr + row)
    tl.store(seq_lens, sparse + tl.zeros_like(heads), mask=heads < num_kv_heads)
    tl.store(dense_seq_lens_ptr + row, seq_len)
    tl.store(token_positions_ptr + row, computed + length + 1)
