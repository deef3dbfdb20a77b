"""The distributions that vLLM's outer test reads: level 2's own, or certainty where nothing is
proposed."""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.bookkeeping import PAD_TOKEN
from vllm_triforce.kernels.row_metadata import IS_CERTAIN, STATE, row_value
from vllm_triforce.kernels.rows import Rows

_BLOCK = 4096


@dataclass
class HandedUp:
    """Where the outer test reads level 2's distributions."""

    logits: torch.Tensor  # [max_num_reqs, num_speculative_tokens, vocab_size], by state
    is_stale: torch.Tensor  # [max_num_reqs, num_speculative_tokens], int8; 0: PAD_TOKEN is certain


@triton.jit
def _export_kernel(
    draft_logits_ptr,  # [max_num_reqs, num_speculative_tokens, vocab_stride], written
    state_stride,
    place_stride,
    is_stale_ptr,  # [max_num_reqs, num_speculative_tokens], written
    row_metadata_ptr,  # [num_reqs, NUM_COLUMNS]
    logits_ptr,  # [num_reqs, places, vocab_size]; not read where ALL_CERTAIN
    length_ptr,  # [num_reqs], after emission
    num_emitted_ptr,  # [num_reqs]
    temperature_ptr,  # [num_reqs]
    proposal_ptr,  # [num_reqs, num_speculative_tokens]
    num_speculative_tokens,
    vocab_size,
    ALL_CERTAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    emitted = tl.load(num_emitted_ptr + row)
    place = tl.program_id(1)
    if (place >= emitted) | (tl.load(temperature_ptr + row) == 0.0):
        return
    state = row_value(row_metadata_ptr, row, STATE).to(tl.int64)
    to = tl.load(length_ptr + row) - emitted + place
    tokens = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    if ALL_CERTAIN:
        token = tl.load(proposal_ptr + row * num_speculative_tokens + to)
        logits = tl.where(tokens == token, 0.0, float("-inf"))
    else:
        source = logits_ptr + (row * tl.num_programs(1) + place) * vocab_size
        logits = tl.load(source + tokens, mask=mask)
        if row_value(row_metadata_ptr, row, IS_CERTAIN) != 0:
            token = tl.load(proposal_ptr + row * num_speculative_tokens + to)
            logits = tl.where(tokens == token, 0.0, float("-inf")).to(logits.dtype)
    out = draft_logits_ptr + state * state_stride + to * place_stride
    tl.store(out + tokens, logits.to(draft_logits_ptr.dtype.element_ty), mask=mask)
    tl.store(is_stale_ptr + state * num_speculative_tokens + to, 1)


@triton.jit
def _clear_distributions_kernel(
    draft_logits_ptr,  # [max_num_reqs, num_speculative_tokens, vocab], written
    state_stride,
    place_stride,
    is_stale_ptr,  # [max_num_reqs, num_speculative_tokens]
    states_ptr,  # [batch size]
    num_proposed_ptr,  # [max_num_reqs]
    num_speculative_tokens,
    vocab_width,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    state = tl.load(states_ptr + tl.program_id(0)).to(tl.int64)
    place = tl.program_id(1)
    if place < tl.load(num_proposed_ptr + state):
        return
    if tl.load(is_stale_ptr + state * num_speculative_tokens + place) == 0:
        return
    out = draft_logits_ptr + state * state_stride + place * place_stride
    for start in range(0, vocab_width, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        certain = tl.where(tokens == PAD, 0.0, float("-inf"))
        tl.store(out + tokens, certain, mask=tokens < vocab_width)
    tl.store(is_stale_ptr + state * num_speculative_tokens + place, 0)


def export_distributions(
    handed_up: HandedUp,  # written
    rows: Rows,  # after emission
    logits: torch.Tensor | None,  # [num_rows, num_places, vocab_size], masked; None: see below
) -> None:
    """Copies the logits from which the newest tokens were drawn to where the outer test reads them.

    Where a row is certain (``RowColumn.IS_CERTAIN``), each token is said to be: a proposal that is
    cut at a place that depends on its tokens, as a grammar does, is tested rightly only so; and
    where there are no logits, none was drawn.
    """
    num_places = rows.gamma if logits is None else logits.shape[1]
    vocab_size = handed_up.logits.shape[2] if logits is None else logits.shape[2]
    _export_kernel[(rows.num_rows, num_places, triton.cdiv(vocab_size, _BLOCK))](
        handed_up.logits,
        handed_up.logits.stride(0),
        handed_up.logits.stride(1),
        handed_up.is_stale,
        rows.row_metadata,
        handed_up.logits if logits is None else logits,
        rows.length,
        rows.num_emitted,
        rows.temperature,
        rows.proposal,
        rows.num_speculative_tokens,
        vocab_size,
        ALL_CERTAIN=logits is None,
        BLOCK=_BLOCK,
    )


def clear_distributions(
    handed_up: HandedUp,  # written
    states: torch.Tensor,  # [batch size], int
    num_proposed: torch.Tensor,  # [max_num_reqs], int32
) -> None:
    """Where nothing is proposed any more, PAD_TOKEN is certain again."""
    _, num_places, vocab_size = handed_up.logits.shape
    _clear_distributions_kernel[(len(states), num_places)](
        handed_up.logits,
        handed_up.logits.stride(0),
        handed_up.logits.stride(1),
        handed_up.is_stale,
        states,
        num_proposed,
        num_places,
        vocab_size,
        PAD=PAD_TOKEN,
        BLOCK=_BLOCK,
    )
