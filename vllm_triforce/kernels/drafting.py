"""Drawing level 1's tokens, without a word to the host."""

from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import noise as _noise
from vllm_triforce.kernels.distributions import Distributions, DrawParameters, LevelLogits
from vllm_triforce.kernels.race import Race, race_kernel, winner
from vllm_triforce.kernels.rows import Rows

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
    race: Race,
) -> None:
    """Draws one token of level 1 for each row."""
    if draft.distributions is not None:
        _race_for_drafts(rows, step, draft.distributions, sampling, race)
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


def _race_for_drafts(
    rows: Rows, step: int, draft: Distributions, sampling: DrawParameters, race: Race
) -> None:
    count = rows.num_rows
    token_positions = rows.computed[:count] + rows.length[:count] + (1 + step)
    race_kernel[(count, race.num_blocks)](
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
