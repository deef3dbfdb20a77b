"""Drawing level 1's tokens, without a word to the host."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import noise as _noise
from vllm_triforce.kernels.faults import Faults
from vllm_triforce.kernels.race import Race, race_kernel, winner

_DRAFT = _noise.DRAFT


@triton.jit
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
    drafted: torch.Tensor,  # [num_reqs, gamma], int32, column ``step`` is written
    step: int,
    best: torch.Tensor,  # [num_reqs], argmax of each row
    top: torch.Tensor,  # [num_reqs], its logit; NaN where the row has one
    faults: Faults,  # of the rows; written
    logits: torch.Tensor | None,  # [num_reqs, vocab_size], masked; None if all are greedy
    lse: torch.Tensor | None,  # [num_reqs], float32, of logits / temperature
    temperature: torch.Tensor,  # [num_reqs], float32
    seeds: torch.Tensor,  # [num_reqs], int64
    places: torch.Tensor,  # [num_reqs], int32, index of the token that is drawn
    race: Race,
) -> None:
    """Draws one token of level 1 for each request."""
    num_reqs, gamma = drafted.shape
    if logits is not None:
        _race_for_drafts(drafted, logits, lse, temperature, seeds, places, race)
    _pick_kernel[(num_reqs,)](
        drafted,
        race.values,
        race.tokens,
        best,
        top,
        faults.row,
        temperature,
        race.num_blocks,
        gamma,
        step,
        ALL_GREEDY=logits is None,
        PADDED_BLOCKS=race.padded_blocks,
    )


def _race_for_drafts(drafted, logits, lse, temperature, seeds, places, race: Race) -> None:
    num_reqs, vocab_size = logits.shape
    race_kernel[(num_reqs, race.num_blocks)](
        logits,
        lse,
        logits,
        lse,
        drafted,
        drafted,
        drafted,
        temperature,
        seeds,
        places,
        race.values,
        race.tokens,
        vocab_size,
        PLACES=1,
        PURPOSE=_DRAFT,
        CERTAIN=True,
        BLOCK=race.block,
    )
