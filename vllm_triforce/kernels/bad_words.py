"""``bad_words`` in the logits of a proposal's rows, as vLLM's sampler has them in the full pass's
(vllm/v1/worker/gpu/sample/bad_words.py)."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.asked_of_logits import AskedOfLogits
from vllm_triforce.kernels.row_metadata import STATE, row_value
from vllm_triforce.kernels.rows import Rows


@triton.jit(do_not_specialize=["first_place"])
def _bad_words_kernel(
    logits_ptr,  # [num_rows * query_len, vocab_size], changed
    logits_stride,
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    num_rows_ptr,  # [1]
    num_words_ptr,  # [max_num_reqs]
    word_tokens_ptr,  # [max_num_reqs, tokens of all words]
    word_tokens_stride,
    word_starts_ptr,  # [max_num_reqs, words + 1], where each begins among them
    word_starts_stride,
    prompt_len_ptr,  # [max_num_reqs]
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    all_token_ids_stride,
    computed_ptr,  # [num_rows]
    proposal_ptr,  # [num_rows, num_speculative_tokens]
    num_speculative_tokens,
    length_ptr,  # [num_rows]
    drafted_ptr,  # [num_rows, gamma]
    gamma,
    first_place,
    query_len,
    vocab_size,
    PADDED_WORDS: tl.constexpr,
):
    of_logits = tl.program_id(0).to(tl.int64)
    row = of_logits // query_len
    if row >= tl.load(num_rows_ptr):
        return
    state = row_value(row_metadata_ptr, row, STATE).to(tl.int64)
    num_words = tl.load(num_words_ptr + state)
    if num_words == 0:
        return
    # The request's tokens, of which so many are known to vLLM, so many proposed, the rest drafts.
    num_known = tl.load(computed_ptr + row) + 1
    num_settled = num_known + tl.load(length_ptr + row)
    num_tokens = num_settled + first_place + (of_logits % query_len).to(tl.int32)

    word = tl.arange(0, PADDED_WORDS)
    exists = word < num_words
    starts = word_starts_ptr + state * word_starts_stride + word
    start = tl.load(starts, mask=exists, other=0)
    last = tl.load(starts + 1, mask=exists, other=1) - 1
    prefix_len = last - start
    # Of a word whose other tokens were the output's newest, the last one may not come.
    begin = num_tokens - prefix_len
    is_bad = exists & (begin >= tl.load(prompt_len_ptr + state))
    words = word_tokens_ptr + state * word_tokens_stride
    for i in range(tl.max(prefix_len, 0)):
        looks = is_bad & (i < prefix_len)
        index = begin + i
        known = tl.load(
            all_token_ids_ptr + state * all_token_ids_stride + index,
            mask=looks & (index < num_known),
            other=0,
        )
        proposed = tl.load(
            proposal_ptr + row * num_speculative_tokens + index - num_known,
            mask=looks & (index >= num_known) & (index < num_settled),
            other=0,
        )
        drafted = tl.load(
            drafted_ptr + row * gamma + index - num_settled,
            mask=looks & (index >= num_settled),
            other=0,
        )
        # Where it was not looked for, both are 0.
        found = known + proposed.to(tl.int32) + drafted
        is_bad &= tl.load(words + start + i, mask=looks, other=0) == found
    token = tl.load(words + last, mask=is_bad, other=0)
    is_bad &= token < vocab_size  # a tokenizer may have more
    tl.store(logits_ptr + of_logits * logits_stride + token, float("-inf"), mask=is_bad)


def forbid_bad_words(
    logits: torch.Tensor,  # [num_rows * query_len, vocab_size], float32, changed
    query_len: int,
    first_place: int,
    rows: Rows,
    asked: AskedOfLogits,
    word_tokens: torch.Tensor,  # [max_num_reqs, tokens of all words], int32
    word_starts: torch.Tensor,  # [max_num_reqs, words + 1], int32
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32
) -> None:
    """Of each row's places ``first_place`` and on: what follows the proposal and as many drafts."""
    _bad_words_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        rows.row_metadata,
        rows.count,
        asked.num_bad_words,
        word_tokens,
        word_tokens.stride(0),
        word_starts,
        word_starts.stride(0),
        asked.prompt_len,
        all_token_ids,
        all_token_ids.stride(0),
        rows.computed,
        rows.proposal,
        rows.num_speculative_tokens,
        rows.length,
        rows.drafted,
        rows.gamma,
        first_place,
        query_len,
        logits.shape[1],
        PADDED_WORDS=triton.next_power_of_2(word_starts.shape[1] - 1),
    )
