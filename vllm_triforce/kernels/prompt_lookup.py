"""Prompt lookup for all rows at once.

Draft the tokens that followed the newest earlier occurrence of the longest matching n-gram.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.pass_inputs import token_at
from vllm_triforce.kernels.rows import Rows

_BLOCK = tl.constexpr(1024)


def gather_tokens(
    rows: Rows,
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32, by state
    num_tokens: int,  # upper bound of the rows' lengths
) -> torch.Tensor:  # [num_rows, num_tokens], int32; undefined past a row's newest token
    """Copy the rows' tokens to the device, once for all rounds of a proposal.

    On a GPU vLLM keeps them in host memory.
    """
    tokens = torch.empty((rows.num_rows, num_tokens), dtype=torch.int32, device=rows.table.device)
    _gather_kernel[(rows.num_rows, triton.cdiv(num_tokens, _BLOCK.value))](
        rows.table, all_token_ids, all_token_ids.stride(0), tokens, num_tokens
    )
    return tokens


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    table_ptr,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len], by state
    token_stride,
    tokens_ptr,  # [num_rows, num_tokens], written
    num_tokens,
):
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(table_ptr + row * col.ROW_STRIDE + col.STATE).to(tl.int64)
    computed = tl.load(table_ptr + row * col.ROW_STRIDE + col.COMPUTED)
    indices = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    mask = (indices <= computed) & (indices < num_tokens)
    tokens = tl.load(all_token_ids_ptr + state * token_stride + indices, mask=mask)
    tl.store(tokens_ptr + row * num_tokens + indices, tokens, mask=mask)


def look_up(
    rows: Rows,
    tokens: torch.Tensor,  # [num_rows, num_tokens], int32, of ``gather_tokens``
    max_ngram: int,
    max_tokens: int,  # of a request and its proposal
) -> None:
    """Write ``rows.drafted`` and ``rows.num_drafted`` for the first ``rows.num_rows`` rows.

    A draft ends before a token -1.
    """
    num_blocks = triton.cdiv(tokens.shape[1] + rows.num_speculative_tokens, _BLOCK.value)
    matches = torch.empty((rows.num_rows, num_blocks), dtype=torch.int64, device=tokens.device)
    context = rows.table, tokens, tokens.stride(0), matches
    _scan_kernel[(rows.num_rows, num_blocks)](*context, MAX_NGRAM=max_ngram)
    max_blocks = triton.cdiv(max_tokens, _BLOCK.value)
    _follow_kernel[(rows.num_rows,)](
        *context, num_blocks, rows.gamma, PADDED_BLOCKS=triton.next_power_of_2(max_blocks)
    )


@triton.jit(do_not_specialize=["token_stride"])
def _scan_kernel(
    table_ptr,
    tokens_ptr,  # [num_rows, token_stride]
    token_stride,
    matches_ptr,  # [num_rows, num_blocks], int64, written: each block's best match
    MAX_NGRAM: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    computed = tl.load(row_ptr + col.COMPUTED)
    last = computed + tl.load(row_ptr + col.LENGTH)
    tokens_ptr += row.to(tl.int64) * token_stride
    ends = block * _BLOCK + tl.arange(0, _BLOCK)
    matches = ends < last
    match_len = tl.zeros_like(ends)
    for back in tl.static_range(MAX_NGRAM):
        suffix = token_at(tokens_ptr, row_ptr, computed, tl.maximum(last - back, 0))
        index = tl.where(matches, ends - back, 0)
        token = token_at(tokens_ptr, row_ptr, computed, tl.maximum(index, 0))
        matches = matches & (ends >= back) & (last - back > 0) & (token == suffix)
        match_len += matches.to(tl.int32)
    # The largest key is the longest match, and of equally long ones the newest.
    key = tl.where(match_len > 0, (match_len.to(tl.int64) << 32) + ends, -1)
    tl.store(matches_ptr + row * tl.num_programs(1) + block, tl.max(key, axis=0))


@triton.jit(do_not_specialize=["token_stride", "num_blocks"])
def _follow_kernel(
    table_ptr,  # drafts and their number are written
    tokens_ptr,  # [num_rows, token_stride]
    token_stride,
    matches_ptr,  # [num_rows, num_blocks], of ``_scan_kernel``
    num_blocks,
    gamma,
    PADDED_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = table_ptr + row * col.ROW_STRIDE
    computed = tl.load(row_ptr + col.COMPUTED)
    last = computed + tl.load(row_ptr + col.LENGTH)
    tokens_ptr += row.to(tl.int64) * token_stride
    drafted = row_ptr + col.DRAFTED
    blocks = tl.arange(0, PADDED_BLOCKS)
    keys = tl.load(matches_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-1)
    best = tl.max(keys, axis=0)
    begin = (best & 0xFFFFFFFF).to(tl.int32) + 1
    num_drafted = tl.where(best >= 0, gamma, 0)
    # Past the newest token the draft repeats itself, with a period of last + 1 - begin.
    period = tl.maximum(last + 1 - begin, 1)
    for step in range(0, gamma):
        index = tl.where(best >= 0, begin + step % period, 0)
        token = token_at(tokens_ptr, row_ptr, computed, index)
        num_drafted = tl.where(token < 0, tl.minimum(num_drafted, step), num_drafted)
        tl.store(drafted + step, tl.maximum(token, 0))
    tl.store(row_ptr + col.NUM_DRAFTED, num_drafted)
