"""Level 3's test at given acceptance rates (``rejection_sample_method: synthetic``).

vLLM's test has one rate for each place of all proposals. Here the rate depends on the route too: a
direct draft is level 1's. So the number of accepted tokens is drawn when a proposal is committed.
vLLM's test then accepts every token, and finds -1, which it rejects, after these.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import row_table as col
from vllm_triforce.kernels.draw import SYNTHETIC, uniform
from vllm_triforce.kernels.rows import Rows, load_seed

ACCEPT_ALL = 2.0
"""A rate above all numbers that vLLM's test draws."""


class SyntheticTest:
    """Draw the number of accepted tokens of each proposal.

    Args:
        rates: probability that the token of each place is accepted, if those before it are.
        direct_rate: that of a direct draft's tokens; None for ``rates``.
        num_owners: ``num_slots + max_num_reqs``, as in ``Level3TestRows``.
    """

    def __init__(
        self, rates: list[float], direct_rate: float | None, num_owners: int, device: torch.device
    ) -> None:
        direct = rates if direct_rate is None else [direct_rate] * len(rates)
        # [2, num_speculative_tokens]: through the levels, and direct.
        self._rates = torch.tensor([rates, direct], dtype=torch.float32, device=device)
        self.num_accepted = torch.zeros(num_owners, dtype=torch.int32, device=device)
        """[num_owners], by slot; 0 beyond the slots, whose owners have no proposal."""

    def draw(self, rows: Rows, is_direct: bool) -> None:
        """Draw for the rows' committed proposals."""
        _draw_kernel[(rows.num_rows,)](
            self.num_accepted,
            self._rates[int(is_direct)],
            rows.table,
            rows.num_speculative_tokens,
            PADDED_LEN=triton.next_power_of_2(rows.num_speculative_tokens),
        )

    def reject(
        self,
        draft_tokens: torch.Tensor,  # [num_logits], changed
        owners: torch.Tensor,  # [num_logits], int32
        places: torch.Tensor,  # [num_logits], int32, each row's place among the request's rows
    ) -> None:
        """Replace the tokens after the accepted ones by -1, which vLLM's test rejects."""
        draft_tokens.masked_fill_(places > self.num_accepted[owners], -1)


@triton.jit
def _draw_kernel(
    num_accepted_ptr,  # [num_owners], by slot, written
    rates_ptr,  # [num_speculative_tokens]
    table_ptr,
    num_speculative_tokens,
    PADDED_LEN: tl.constexpr,
):
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * col.ROW_STRIDE
    places = tl.arange(0, PADDED_LEN)
    rates = tl.load(rates_ptr + places, mask=places < num_speculative_tokens, other=0.0)
    begin = tl.load(row_ptr + col.COMPUTED)
    chances = uniform(load_seed(row_ptr), begin, begin + 1 + places, SYNTHETIC)
    first_rejected = tl.min(tl.where(chances < rates, PADDED_LEN, places), axis=0)
    tl.store(num_accepted_ptr + tl.load(row_ptr + col.SLOT), first_rejected)
