"""Penalties and ``bad_words`` on the logits of a proposal's rows, within CUDA graphs.

They change the logits as vLLM's sampler changes those of the full pass
(vllm/v1/worker/gpu/sample/penalties.py,
vllm/v1/worker/gpu/sample/bad_words.py).
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.pass_inputs import token_at
from vllm_triforce.kernels.rows import Rows

_BLOCK = tl.constexpr(4096)  # tokens of a program


def apply_penalties(
    logits: torch.Tensor,  # [num_rows * query_len, vocab_size], float32, changed
    query_len: int,
    first_place: int,
    rows: Rows,
    penalties: torch.Tensor,  # [3, max_num_reqs], float32: repetition, frequency, presence
    in_prompt: torch.Tensor,  # [max_num_reqs, vocab_size / 32], int32
    output_counts: torch.Tensor,  # [max_num_reqs, vocab_size], int32
) -> None:
    """Apply penalties to the logits of ``query_len`` places of each row.

    Args:
        first_place: drafts before the first of these places, after the proposal.
        in_prompt: a bit for each token, by state.
        output_counts: occurrences of each token in the request's output, by state.
    """
    vocab_size = logits.shape[1]
    _penalties_kernel[(rows.num_rows, query_len, triton.cdiv(vocab_size, _BLOCK.value))](
        logits,
        logits.stride(0),
        rows.table,
        penalties,
        penalties.stride(0),
        in_prompt,
        in_prompt.stride(0),
        output_counts,
        output_counts.stride(0),
        first_place,
        vocab_size,
    )


@triton.jit(do_not_specialize=["first_place"])
def _penalties_kernel(
    logits_ptr,  # [num_rows * query_len, vocab_size], changed
    logits_stride,
    table_ptr,
    penalties_ptr,  # [3, max_num_reqs]
    max_num_reqs,
    in_prompt_ptr,  # [max_num_reqs, vocab_size / 32], a bit for each token
    in_prompt_stride,
    counts_ptr,  # [max_num_reqs, vocab_size], of the output
    counts_stride,
    first_place,
    vocab_size,
):
    # vLLM counts the tokens of the output. Those of the proposal, and of the drafts before the
    # place, are added here.
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(table_ptr + col.NUM_ROWS):
        return
    row_ptr = table_ptr + row * col.ROW_STRIDE
    state = tl.load(row_ptr + col.STATE).to(tl.int64)
    repetition = tl.load(penalties_ptr + state)
    frequency = tl.load(penalties_ptr + max_num_reqs + state)
    presence = tl.load(penalties_ptr + 2 * max_num_reqs + state)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    logits_ptr += (row * tl.num_programs(1) + place) * logits_stride
    token = tl.program_id(2) * _BLOCK + tl.arange(0, _BLOCK)
    mask = token < vocab_size
    counts = tl.load(counts_ptr + state * counts_stride + token, mask=mask, other=0)
    for i in range(tl.load(row_ptr + col.LENGTH)):
        counts += (token == tl.load(row_ptr + col.PROPOSED + i)).to(tl.int32)
    for i in range(first_place + place):
        counts += (token == tl.load(row_ptr + col.DRAFTED + i)).to(tl.int32)
    in_output = counts > 0
    values = tl.load(logits_ptr + token, mask=mask, other=0.0)
    # Rounded as in vLLM, so that both give the same numbers: by a product with the reciprocal, in a
    # branch, or the compiler would fuse it with the frequency's subtraction.
    if repetition != 1.0:
        bits = tl.load(in_prompt_ptr + state * in_prompt_stride + token // 32, mask=mask, other=0)
        in_prompt = ((bits >> (token % 32)) & 1) != 0
        scale = tl.where(in_prompt | in_output, repetition, 1.0)
        values *= tl.where(values > 0, 1.0 / scale, scale)
    values -= frequency * counts
    values -= presence * in_output.to(tl.float32)
    tl.store(logits_ptr + token, values, mask=mask)


def forbid_bad_words(
    logits: torch.Tensor,  # [num_rows * query_len, vocab_size], float32, changed
    query_len: int,
    first_place: int,
    rows: Rows,
    prompt_len: torch.Tensor,  # [max_num_reqs], int32
    num_words: torch.Tensor,  # [max_num_reqs], int32
    word_tokens: torch.Tensor,  # [max_num_reqs, tokens of all words], int32
    word_starts: torch.Tensor,  # [max_num_reqs, words + 1], int32
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32
) -> None:
    """Mask the last token of each bad word whose other tokens are the request's newest.

    Args:
        first_place: drafts before the first of the ``query_len`` places, after the proposal.
    """
    _bad_words_kernel[(rows.num_rows, query_len)](
        logits,
        logits.stride(0),
        rows.table,
        prompt_len,
        num_words,
        word_tokens,
        word_tokens.stride(0),
        word_starts,
        word_starts.stride(0),
        all_token_ids,
        all_token_ids.stride(0),
        first_place,
        logits.shape[1],
        PADDED_WORDS=triton.next_power_of_2(word_starts.shape[1] - 1),
    )


@triton.jit(do_not_specialize=["first_place"])
def _bad_words_kernel(
    logits_ptr,  # [num_rows * query_len, vocab_size], changed
    logits_stride,
    table_ptr,
    prompt_len_ptr,  # [max_num_reqs]
    num_words_ptr,  # [max_num_reqs]
    word_tokens_ptr,  # [max_num_reqs, tokens of all words]
    word_tokens_stride,
    word_starts_ptr,  # [max_num_reqs, words + 1], where each begins among them
    word_starts_stride,
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    all_token_ids_stride,
    first_place,
    vocab_size,
    PADDED_WORDS: tl.constexpr,
):
    # The bad word 5 6 9, of 12 known tokens, a proposal of one token and two drafts before a place:
    #     index    ... 11    12         13   14     15
    #     token        known proposed   5    6      the place: 9 is forbidden here
    #                                   begin = 15 - 2, and all from there on equal the word's
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(table_ptr + col.NUM_ROWS):
        return
    row_ptr = table_ptr + row * col.ROW_STRIDE
    state = tl.load(row_ptr + col.STATE).to(tl.int64)
    num_words = tl.load(num_words_ptr + state)
    if num_words == 0:
        return
    # The request's tokens: first those that vLLM has, then the proposal, then the drafts.
    computed = tl.load(row_ptr + col.COMPUTED)
    num_settled = computed + 1 + tl.load(row_ptr + col.LENGTH)
    num_tokens = num_settled + first_place + place

    word = tl.arange(0, PADDED_WORDS)
    exists = word < num_words
    starts = word_starts_ptr + state * word_starts_stride + word
    start = tl.load(starts, mask=exists, other=0)
    last = tl.load(starts + 1, mask=exists, other=1) - 1
    prefix_len = last - start
    # A word's last token is forbidden where its other tokens are the output's newest.
    begin = num_tokens - prefix_len
    is_bad = exists & (begin >= tl.load(prompt_len_ptr + state))
    words = word_tokens_ptr + state * word_tokens_stride
    known_tokens = all_token_ids_ptr + state * all_token_ids_stride
    for i in range(tl.max(prefix_len, 0)):
        is_compared = is_bad & (i < prefix_len)
        index = tl.where(is_compared, begin + i, 0)
        is_draft = index >= num_settled
        token = token_at(known_tokens, row_ptr, computed, tl.where(is_draft, 0, index))
        draft = tl.load(row_ptr + col.DRAFTED + index - num_settled, mask=is_draft, other=0)
        token = tl.where(is_draft, draft, token)
        word_token = tl.load(words + start + i, mask=is_compared, other=0)
        is_bad &= (word_token == token) | (i >= prefix_len)
    forbidden = tl.load(words + last, mask=is_bad, other=0)
    is_bad &= forbidden < vocab_size  # a tokenizer may have more
    logits_ptr += (row * tl.num_programs(1) + place) * logits_stride
    tl.store(logits_ptr + forbidden, float("-inf"), mask=is_bad)
