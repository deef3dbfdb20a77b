"""Level 1's tokens as a proposal of their own, which goes straight to the full pass."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.counters import NUM_NAN_REQUESTS
from vllm_triforce.kernels.distributions import Distributions
from vllm_triforce.kernels.row_metadata import SLOT, row_value
from vllm_triforce.kernels.rows import Rows


@triton.jit
def _extend_kernel(
    proposal_ptr,  # [num_rows, num_speculative_tokens], written
    length_ptr,  # [num_rows], written
    room_ptr,  # [num_rows], written
    num_emitted_ptr,  # [num_rows], written
    counters_ptr,  # [num_counters], added to
    row_fault_ptr,  # [num_rows]
    slot_fault_ptr,  # [num_slots], written
    row_metadata_ptr,  # [num_rows, NUM_COLUMNS]
    drafted_ptr,  # [num_rows, gamma]
    num_drafted_ptr,  # [num_rows]
    lse_ptr,  # [num_rows, gamma]
    num_speculative_tokens,
    gamma,
    CERTAIN: tl.constexpr,
    PADDED_LEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + row)
    room = tl.load(room_ptr + row)
    tl.store(num_emitted_ptr + row, 0)
    if length < room:
        places = tl.arange(0, PADDED_LEN)
        drafted = tl.load(num_drafted_ptr + row)
        emitted = tl.minimum(drafted, room - length)
        if tl.load(row_fault_ptr + row) != 0:
            # What was drawn before the NaN stays: whether a token is dropped must not depend on
            # what was drawn behind it. A greedy row has no distributions, and loses nothing.
            first_wrong = 0
            if not CERTAIN:
                lse = tl.load(lse_ptr + row * gamma + places, mask=places < gamma, other=0.0)
                is_right = (lse == lse) & (tl.abs(lse) < float("inf"))
                first_wrong = tl.min(tl.where(is_right, PADDED_LEN, places), axis=0)
            emitted = tl.minimum(emitted, first_wrong)
            drafted = 0
            tl.store(slot_fault_ptr + row_value(row_metadata_ptr, row, SLOT), 1)
            tl.atomic_add(counters_ptr + NUM_NAN_REQUESTS, 1)
        token = tl.load(drafted_ptr + row * gamma + places, mask=places < emitted, other=0)
        out = proposal_ptr + row * num_speculative_tokens + length
        tl.store(out + places, token.to(tl.int64), mask=places < emitted)
        if drafted < gamma:  # there is no more to come
            tl.store(room_ptr + row, length + emitted)
        tl.store(length_ptr + row, length + emitted)
        tl.store(num_emitted_ptr + row, emitted)


def extend_proposals(
    rows: Rows,  # what was drafted; the proposals are extended by it
    drafted: Distributions | None,  # level 1's, of gamma places; None: each token was certain
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Appends each row's drafts to its proposal, as far as there is room."""
    _extend_kernel[(rows.num_rows,)](
        rows.proposal,
        rows.length,
        rows.room,
        rows.num_emitted,
        counters,
        rows.faults.row,
        rows.faults.slot,
        rows.row_metadata,
        rows.drafted,
        rows.num_drafted,
        rows.drafted if drafted is None else drafted.lse,
        rows.num_speculative_tokens,
        rows.gamma,
        CERTAIN=drafted is None,
        PADDED_LEN=triton.next_power_of_2(rows.gamma),
    )
