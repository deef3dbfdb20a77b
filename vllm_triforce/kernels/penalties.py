"""Penalties on the logits of a proposal's rows, as vLLM's sampler puts them on the full pass's
(vllm/v1/worker/gpu/sample/penalties.py)."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.asked_of_logits import AskedOfLogits
from vllm_triforce.kernels.row_metadata import STATE, row_value
from vllm_triforce.kernels.rows import Rows

_BLOCK = 4096


@triton.jit(do_not_specialize=["first_place"])
def _penalties_kernel(
    logits_ptr,  # [num_rows * query_len, vocab_size], changed
    logits_stride,
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    num_rows_ptr,  # [1]
    repetition_ptr,  # [max_num_reqs], as the two below
    frequency_ptr,
    presence_ptr,
    in_prompt_ptr,  # [max_num_reqs, vocab_size / 32], a bit for each token
    in_prompt_stride,
    counts_ptr,  # [max_num_reqs, vocab_size], of the output
    counts_stride,
    proposal_ptr,  # [num_rows, num_speculative_tokens]
    num_speculative_tokens,
    length_ptr,  # [num_rows]
    drafted_ptr,  # [num_rows, gamma]
    gamma,
    first_place,
    query_len,
    vocab_size,
    BLOCK: tl.constexpr,
):
    of_logits = tl.program_id(0).to(tl.int64)
    row = of_logits // query_len
    if row >= tl.load(num_rows_ptr):
        return
    state = row_value(row_metadata_ptr, row, STATE).to(tl.int64)
    repetition = tl.load(repetition_ptr + state)
    frequency = tl.load(frequency_ptr + state)
    presence = tl.load(presence_ptr + state)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    counts = tl.load(counts_ptr + state * counts_stride + token, mask=mask, other=0)
    for i in range(tl.load(length_ptr + row)):
        proposed = tl.load(proposal_ptr + row * num_speculative_tokens + i)
        counts += (token == proposed.to(tl.int32)).to(tl.int32)
    for i in range(first_place + of_logits % query_len):
        counts += (token == tl.load(drafted_ptr + row * gamma + i)).to(tl.int32)
    in_output = counts > 0
    values = tl.load(logits_ptr + of_logits * logits_stride + token, mask=mask, other=0.0)
    # Rounded where vLLM rounds, so that both find the same numbers: a product with the reciprocal,
    # in a branch, or a compiler would make one operation of it and the frequency's.
    if repetition != 1.0:
        bits = tl.load(in_prompt_ptr + state * in_prompt_stride + token // 32, mask=mask, other=0)
        in_prompt = ((bits >> (token % 32)) & 1) != 0
        scale = tl.where(in_prompt | in_output, repetition, 1.0)
        values *= tl.where(values > 0, 1.0 / scale, scale)
    values -= frequency * counts
    values -= presence * in_output.to(tl.float32)
    tl.store(logits_ptr + of_logits * logits_stride + token, values, mask=mask)


def apply_penalties(
    logits: torch.Tensor,  # [num_rows * query_len, vocab_size], float32, changed
    query_len: int,
    first_place: int,
    rows: Rows,
    asked: AskedOfLogits,
    in_prompt: torch.Tensor,  # [max_num_reqs, vocab_size / 32], int32
    output_counts: torch.Tensor,  # [max_num_reqs, vocab_size], int32
) -> None:
    """Of each row's places ``first_place`` and on: what follows the proposal and as many drafts.

    Args:
        in_prompt: a bit for each token, by state.
        output_counts: how often the request's output has each, by state.
    """
    num_tokens, vocab_size = logits.shape
    _penalties_kernel[(num_tokens, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        logits.stride(0),
        rows.row_metadata,
        rows.count,
        asked.repetition,
        asked.frequency,
        asked.presence,
        in_prompt,
        in_prompt.stride(0),
        output_counts,
        output_counts.stride(0),
        rows.proposal,
        rows.num_speculative_tokens,
        rows.length,
        rows.drafted,
        rows.gamma,
        first_place,
        query_len,
        vocab_size,
        BLOCK=_BLOCK,
    )
