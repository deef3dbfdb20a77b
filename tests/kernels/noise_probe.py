"""What the kernels' noise is at a token's position, so that an oracle can use the same."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels.draw import ACCEPT, DRAFT, RECOVER, exponential, uniform


@triton.jit
def _probe_kernel(
    seeds_ptr,
    begins_ptr,
    token_positions_ptr,
    chances_ptr,
    recover_ptr,
    draft_ptr,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    seed, begin = tl.load(seeds_ptr + row), tl.load(begins_ptr + row)
    position = tl.load(token_positions_ptr + row)
    tl.store(chances_ptr + row, uniform(seed, begin, position, ACCEPT))
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    out = row * size + offsets
    tl.store(recover_ptr + out, exponential(seed, begin, position, RECOVER, offsets), mask=mask)
    tl.store(draft_ptr + out, exponential(seed, begin, position, DRAFT, offsets), mask=mask)


def probe(seeds: torch.Tensor, begins: torch.Tensor, token_positions: torch.Tensor, size: int):
    """Return uniform numbers [n], and exponential ones of recovering and drafting, [n, size]."""
    device = seeds.device
    chances = torch.zeros(len(seeds), device=device)
    recover, draft = torch.zeros(2, len(seeds), size, device=device)
    _probe_kernel[(len(seeds),)](
        seeds,
        begins,
        token_positions,
        chances,
        recover,
        draft,
        size,
        BLOCK=triton.next_power_of_2(size),
    )
    return chances, recover, draft
