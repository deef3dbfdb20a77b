"""Prompt lookup for all rows at once.

Draft the tokens that followed the newest earlier occurrence of the longest matching n-gram.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.pass_inputs import token_at
from vllm_triforce.kernels.row_table import COMPUTED, STATE, row_value
from vllm_triforce.kernels.rows import Rows

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    table_ptr,  # of the rows
    max_rows,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len], by state
    token_stride,
    tokens_ptr,  # [num_rows, num_tokens], written
    num_tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    state = row_value(table_ptr, max_rows, row, STATE).to(tl.int64)
    indices = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    computed = row_value(table_ptr, max_rows, row, COMPUTED)
    mask = (indices <= computed) & (indices < num_tokens)
    tokens = tl.load(all_token_ids_ptr + state * token_stride + indices, mask=mask)
    tl.store(tokens_ptr + row.to(tl.int64) * num_tokens + indices, tokens, mask=mask)


@triton.jit(do_not_specialize=["token_stride"])
def _scan_kernel(
    tokens_ptr,  # [num_rows, token_stride]
    token_stride,
    proposal_ptr,
    num_speculative_tokens,
    computed_ptr,
    length_ptr,
    matches_ptr,  # [num_rows, num_blocks], int64, written: each block's best match
    MAX_NGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    computed = tl.load(computed_ptr + row)
    last = computed + tl.load(length_ptr + row)
    row_start = row.to(tl.int64) * token_stride
    proposed = proposal_ptr + row * num_speculative_tokens
    ends = block * BLOCK + tl.arange(0, BLOCK)
    matches = ends < last
    match_len = tl.zeros_like(ends)
    for back in tl.static_range(MAX_NGRAM):
        suffix = token_at(tokens_ptr, row_start, proposed, computed, tl.maximum(last - back, 0))
        index = tl.where(matches, ends - back, 0)
        token = token_at(tokens_ptr, row_start, proposed, computed, tl.maximum(index, 0))
        matches = matches & (ends >= back) & (last - back > 0) & (token == suffix)
        match_len += matches.to(tl.int32)
    # The largest key is the longest match, and of equally long ones the newest.
    key = tl.where(match_len > 0, (match_len.to(tl.int64) << 32) + ends, -1)
    tl.store(matches_ptr + row * tl.num_programs(1) + block, tl.max(key, axis=0))


@triton.jit(do_not_specialize=["token_stride", "num_blocks"])
def _follow_kernel(
    tokens_ptr,  # [num_rows, token_stride]
    token_stride,
    proposal_ptr,
    num_speculative_tokens,
    computed_ptr,
    length_ptr,
    matches_ptr,  # [num_rows, num_blocks], of ``_scan_kernel``
    drafted_ptr,  # [num_rows, gamma], written
    num_drafted_ptr,  # [num_rows], written
    num_blocks,
    gamma,
    PADDED_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    computed = tl.load(computed_ptr + row)
    last = computed + tl.load(length_ptr + row)
    blocks = tl.arange(0, PADDED_BLOCKS)
    keys = tl.load(matches_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-1)
    best = tl.max(keys, axis=0)
    begin = (best & 0xFFFFFFFF).to(tl.int32) + 1
    tl.store(num_drafted_ptr + row, tl.where(best >= 0, gamma, 0))
    # Past the newest token the draft repeats itself, with a period of last + 1 - begin.
    period = tl.maximum(last + 1 - begin, 1)
    for step in range(0, gamma):
        index = tl.where(best >= 0, begin + step % period, 0)
        token = token_at(
            tokens_ptr,
            row.to(tl.int64) * token_stride,
            proposal_ptr + row * num_speculative_tokens,
            computed,
            index,
        )
        tl.store(drafted_ptr + row * gamma + step, token)


def gather_tokens(
    rows: Rows,
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32, by state
    num_tokens: int,  # upper bound of the rows' lengths
) -> torch.Tensor:  # [num_rows, num_tokens], int32; undefined past a row's newest token
    """Copy the rows' tokens to the device, once for all rounds of a proposal.

    On a GPU vLLM keeps them in host memory.
    """
    tokens = torch.empty((rows.num_rows, num_tokens), dtype=torch.int32, device=rows.table.device)
    _gather_kernel[(rows.num_rows, triton.cdiv(num_tokens, _BLOCK))](
        rows.table,
        rows.max_rows,
        all_token_ids,
        all_token_ids.stride(0),
        tokens,
        num_tokens,
        BLOCK=_BLOCK,
    )
    return tokens


def look_up(
    rows: Rows,
    tokens: torch.Tensor,  # [num_rows, num_tokens], int32, of ``gather_tokens``
    max_ngram: int,
    max_tokens: int,  # of a request and its proposal
) -> None:
    """Write ``rows.drafted`` and ``rows.num_drafted`` for the first ``rows.num_rows`` rows."""
    num_blocks = triton.cdiv(tokens.shape[1] + rows.num_speculative_tokens, _BLOCK)
    matches = torch.empty((rows.num_rows, num_blocks), dtype=torch.int64, device=tokens.device)
    context = (
        tokens,
        tokens.stride(0),
        rows.proposal,
        rows.num_speculative_tokens,
        rows.computed,
        rows.length,
        matches,
    )
    _scan_kernel[(rows.num_rows, num_blocks)](*context, MAX_NGRAM=max_ngram, BLOCK=_BLOCK)
    _follow_kernel[(rows.num_rows,)](
        *context,
        rows.drafted,
        rows.num_drafted,
        num_blocks,
        rows.gamma,
        PADDED_BLOCKS=triton.next_power_of_2(triton.cdiv(max_tokens, _BLOCK)),
    )
