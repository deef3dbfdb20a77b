"""``runner_v1/sources/prompt_lookup.py`` on the device, for all rows at once."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.pass_inputs import token_at
from vllm_triforce.kernels.row_table import COMPUTED, STATE, row_value
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.sources.source import DraftSourceV2

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
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    computed = row_value(table_ptr, max_rows, row, COMPUTED)
    mask = (places <= computed) & (places < num_tokens)
    known = tl.load(all_token_ids_ptr + state * token_stride + places, mask=mask)
    tl.store(tokens_ptr + row.to(tl.int64) * num_tokens + places, known, mask=mask)


@triton.jit(do_not_specialize=["token_stride"])
def _scan_kernel(
    tokens_ptr,  # [num_rows, token_stride]
    token_stride,
    proposal_ptr,
    num_speculative_tokens,
    computed_ptr,
    length_ptr,
    found_ptr,  # [num_rows, num_blocks], int64, written: match length and place of the best match
    MAX_NGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    computed = tl.load(computed_ptr + row)
    last = computed + tl.load(length_ptr + row)
    own = row.to(tl.int64) * token_stride
    proposed = proposal_ptr + row * num_speculative_tokens
    ends = block * BLOCK + tl.arange(0, BLOCK)
    matches = ends < last
    matched = tl.zeros_like(ends)
    for back in tl.static_range(MAX_NGRAM):
        wanted = token_at(tokens_ptr, own, proposed, computed, tl.maximum(last - back, 0))
        place = tl.where(matches, ends - back, 0)
        found = token_at(tokens_ptr, own, proposed, computed, tl.maximum(place, 0))
        matches = matches & (ends >= back) & (last - back > 0) & (found == wanted)
        matched += matches.to(tl.int32)
    key = tl.where(matched > 0, (matched.to(tl.int64) << 32) + ends, -1)
    tl.store(found_ptr + row * tl.num_programs(1) + block, tl.max(key, axis=0))


@triton.jit(do_not_specialize=["token_stride", "num_blocks"])
def _follow_kernel(
    tokens_ptr,  # [num_rows, token_stride]
    token_stride,
    proposal_ptr,
    num_speculative_tokens,
    computed_ptr,
    length_ptr,
    found_ptr,
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
    keys = tl.load(found_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-1)
    best = tl.max(keys, axis=0)
    begin = (best & 0xFFFFFFFF).to(tl.int32) + 1
    tl.store(num_drafted_ptr + row, tl.where(best >= 0, gamma, 0))
    # Where the match reaches the end, the draft itself goes on: with a period of last + 1 - begin.
    period = tl.maximum(last + 1 - begin, 1)
    for step in range(0, gamma):
        place = tl.where(best >= 0, begin + step % period, 0)
        token = token_at(
            tokens_ptr,
            row.to(tl.int64) * token_stride,
            proposal_ptr + row * num_speculative_tokens,
            computed,
            place,
        )
        tl.store(drafted_ptr + row * gamma + step, token)


def gather_tokens(
    rows: Rows,
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32, by state
    num_tokens: int,  # upper bound of the rows' lengths
) -> torch.Tensor:  # [num_rows, num_tokens], int32; undefined past a row's newest token
    """The rows' tokens, once for all rounds: on a GPU vLLM's own are in the host's memory."""
    tokens = torch.empty(
        (rows.num_rows, num_tokens), dtype=torch.int32, device=rows.row_metadata.device
    )
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
    max_blocks: int,  # of _BLOCK tokens that a request ever has
) -> None:
    """Writes ``rows.drafted`` and ``rows.num_drafted``: what followed the newest earlier
    occurrence of the longest matching n-gram."""
    num_blocks = triton.cdiv(tokens.shape[1] + rows.num_speculative_tokens, _BLOCK)
    found = torch.empty((rows.num_rows, num_blocks), dtype=torch.int64, device=tokens.device)
    context = (
        tokens,
        tokens.stride(0),
        rows.proposal,
        rows.num_speculative_tokens,
        rows.computed,
        rows.length,
        found,
    )
    _scan_kernel[(rows.num_rows, num_blocks)](*context, MAX_NGRAM=max_ngram, BLOCK=_BLOCK)
    _follow_kernel[(rows.num_rows,)](
        *context,
        rows.drafted,
        rows.num_drafted,
        num_blocks,
        rows.gamma,
        PADDED_BLOCKS=triton.next_power_of_2(max_blocks),
    )


class PromptLookupV2(DraftSourceV2):
    """Prompt lookup.

    Args:
        max_ngram: longest n-gram that is looked up, in tokens.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._tokens: torch.Tensor | None = None

    @classmethod
    def build(cls, parts) -> "PromptLookupV2":
        return cls(parts.config.prompt_lookup_max)

    def draft(self, batch, rows, is_first) -> None:
        if is_first:
            longest = int(batch.max_computed_tokens.max()) + 1
            self._tokens = gather_tokens(rows, batch.all_token_ids, longest)
        assert self._tokens is not None, "a proposal's first round comes first"
        most = batch.all_token_ids.shape[1] + rows.num_speculative_tokens
        look_up(rows, self._tokens, self._max_ngram, triton.cdiv(most, _BLOCK))

    def clean(self, batch, rows) -> None:
        self._tokens = None
