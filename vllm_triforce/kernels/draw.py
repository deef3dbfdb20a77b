"""Drawing from a distribution over the vocabulary: the exponential race, block by block.

Drawing level 1's tokens, without a word to the host.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import noise as _noise
from vllm_triforce.kernels.distributions import Distributions, DrawParameters, LevelLogits
from vllm_triforce.kernels.noise import exponential
from vllm_triforce.kernels.rows import Rows

_BLOCK = 4096


@triton.jit
def draw_kernel(
    target_ptr,  # [num_reqs, PLACES, vocab_size]
    target_lse_ptr,  # [num_reqs, PLACES]
    draft_ptr,  # [num_reqs, PLACES - 1, vocab_size]
    draft_lse_ptr,  # [num_reqs, PLACES - 1]
    drafted_ptr,  # [num_reqs, PLACES - 1]
    num_drafted_ptr,  # [num_reqs]
    num_accepted_ptr,  # [num_reqs]
    temperature_ptr,  # [num_reqs]
    seeds_ptr,  # [num_reqs]
    begins_ptr,  # [num_reqs]
    token_positions_ptr,  # [num_reqs]
    values_ptr,  # [num_reqs, 2, num_blocks]
    tokens_ptr,  # [num_reqs, 2, num_blocks]
    vocab_size,
    PLACES: tl.constexpr,
    PURPOSE: tl.constexpr,
    CERTAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The exponential race of a block of the vocabulary: argmax of probability over noise, for
    the residual distribution and for the target's own."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    place = 0
    if PLACES > 1:
        place = tl.load(num_accepted_ptr + row)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    target_row = row * PLACES + place
    logits = tl.load(target_ptr + target_row * vocab_size + tokens, mask=mask, other=float("-inf"))
    lse = tl.load(target_lse_ptr + target_row)
    probs = tl.exp(logits.to(tl.float32) / temperature - lse)
    seed = tl.load(seeds_ptr + row)
    token_position = tl.load(token_positions_ptr + row) + place
    delay = exponential(seed, tl.load(begins_ptr + row), token_position, PURPOSE, tokens)
    rest = probs
    if PLACES > 1:  # noqa: SIM102, known when the kernel is compiled, the other is not
        if place < tl.load(num_drafted_ptr + row):
            draft_row = row * (PLACES - 1) + place
            if CERTAIN:
                rest = tl.where(tokens == tl.load(drafted_ptr + draft_row), 0.0, probs)
            else:
                drafted = tl.load(
                    draft_ptr + draft_row * vocab_size + tokens, mask=mask, other=float("-inf")
                )
                drafted = drafted.to(tl.float32) / temperature
                rest = probs - tl.exp(drafted - tl.load(draft_lse_ptr + draft_row))
    out = row * 2 * num_blocks + block
    # Comparisons are false for NaN, which therefore never wins.
    value = tl.where(rest > 0, rest, 0.0) / delay
    tl.store(values_ptr + out, tl.max(value, axis=0))
    tl.store(tokens_ptr + out, block * BLOCK + tl.argmax(value, axis=0))
    value = tl.where(probs > 0, probs, 0.0) / delay
    tl.store(values_ptr + out + num_blocks, tl.max(value, axis=0))
    tl.store(tokens_ptr + out + num_blocks, block * BLOCK + tl.argmax(value, axis=0))


@triton.jit
def winner(values_ptr, tokens_ptr, row, num_blocks, PADDED_BLOCKS: tl.constexpr):
    """The token that won a row's race; the target's own race where no residual is left (both
    distributions are equal up to rounding, and the rejection was the rounding error)."""
    blocks = tl.arange(0, PADDED_BLOCKS)
    at = row * 2 * num_blocks + blocks
    mask = blocks < num_blocks
    rest = tl.load(values_ptr + at, mask=mask, other=-1.0)
    if tl.max(rest, axis=0) > 0:
        return tl.load(tokens_ptr + row * 2 * num_blocks + tl.argmax(rest, axis=0))
    whole = tl.load(values_ptr + at + num_blocks, mask=mask, other=-1.0)
    return tl.load(tokens_ptr + (row * 2 + 1) * num_blocks + tl.argmax(whole, axis=0))


class ExponentialSampler:
    """Scratch of the race over the vocabulary.

    Args:
        max_rows: requests that can be drawn for at a time.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        self.num_blocks = triton.cdiv(vocab_size, self.block)
        self.padded_blocks = triton.next_power_of_2(self.num_blocks)
        shape = (max_rows, 2, self.num_blocks)
        self.values = torch.zeros(shape, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)


_DRAFT = _noise.DRAFT


@triton.jit(do_not_specialize=["step"])
def _pick_kernel(
    drafted_ptr,  # [num_reqs, gamma], written
    values_ptr,
    tokens_ptr,
    best_ptr,  # [num_reqs]
    top_ptr,  # [num_reqs]
    fault_ptr,  # [num_reqs], written
    temperature_ptr,  # [num_reqs]
    num_blocks,
    gamma,
    step,
    ALL_GREEDY: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(best_ptr + row).to(tl.int32)
    if not ALL_GREEDY:  # noqa: SIM102, known when the kernel is compiled, the other is not
        if tl.load(temperature_ptr + row) > 0:
            token = winner(values_ptr, tokens_ptr, row, num_blocks, PADDED_BLOCKS)
    top = tl.load(top_ptr + row)
    tl.store(fault_ptr + row, 1, mask=top != top)
    tl.store(drafted_ptr + row * gamma + step, token)


def draw_drafts(
    rows: Rows,  # column ``step`` of ``rows.drafted`` is written
    step: int,
    draft: LevelLogits,  # level 1's, of one place
    sampling: DrawParameters,
    race: ExponentialSampler,
) -> None:
    """Draws one token of level 1 for each row."""
    if draft.distributions is not None:
        _draw_drafts(rows, step, draft.distributions, sampling, race)
    _pick_kernel[(rows.num_rows,)](
        rows.drafted,
        race.values,
        race.tokens,
        draft.best,
        draft.top,
        rows.faults.row,
        sampling.temperature,
        race.num_blocks,
        rows.gamma,
        step,
        ALL_GREEDY=draft.distributions is None,
        PADDED_BLOCKS=race.padded_blocks,
    )


def _draw_drafts(
    rows: Rows, step: int, draft: Distributions, sampling: DrawParameters, race: ExponentialSampler
) -> None:
    count = rows.num_rows
    token_positions = rows.computed[:count] + rows.length[:count] + (1 + step)
    draw_kernel[(count, race.num_blocks)](
        draft.logits,
        draft.lse,
        draft.logits,
        draft.lse,
        rows.drafted,
        rows.drafted,
        rows.drafted,
        sampling.temperature,
        sampling.seeds,
        sampling.begins,
        token_positions,
        race.values,
        race.tokens,
        draft.logits.shape[-1],
        PLACES=1,
        PURPOSE=_DRAFT,
        CERTAIN=True,
        BLOCK=race.block,
    )
