"""Promise: the device finds the room that the host would: one rule for both runners."""

import pytest
import torch

from tests.kernels.device import DEVICE, needs_triton

if needs_triton.mark.args[0]:
    pytest.skip(needs_triton.mark.kwargs["reason"], allow_module_level=True)

from tests.kernels.tensors import VOCAB_SIZE, greedy_parameters, integers
from vllm_triforce.core.eligibility import max_proposal_len
from vllm_triforce.kernels.row_table import Refresh, RowColumn, stack_columns
from vllm_triforce.kernels.rows import RowLimits, Rows

BLOCK_SIZE, NUM_TOKENS, NUM_ROWS = 16, 6, 64


@pytest.mark.parametrize("min_context", [0, 40, 300])
def test_room_is_the_hosts(min_context):
    draw = torch.Generator().manual_seed(min_context)

    def numbers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (NUM_ROWS,), generator=draw)

    computed = numbers(NUM_TOKENS, 600)
    reserved = (computed + numbers(0, 3 * BLOCK_SIZE)) // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE
    limits = computed + numbers(0, 20)
    most = numbers(1, NUM_TOKENS + 1)
    bounds = RowLimits(min_context, BLOCK_SIZE, recent_blocks=2, max_selected=4, width=100)
    rows = Rows(NUM_ROWS, NUM_TOKENS, 2, VOCAB_SIZE, bounds, DEVICE)
    states = list(range(NUM_ROWS))
    table = stack_columns(
        {
            RowColumn.BATCH_ROW: states,
            RowColumn.STATE: states,
            RowColumn.SLOT: states,
            RowColumn.REFRESH: [Refresh.NEW_OWNER] * NUM_ROWS,
            RowColumn.RESERVED: reserved.tolist(),
            RowColumn.LIMIT: limits.tolist(),
            RowColumn.WINDOW_START: [0] * NUM_ROWS,
            RowColumn.MAX_TOKENS: most.tolist(),
            RowColumn.MAX_ROUNDS: [1] * NUM_ROWS,
            RowColumn.ONE_HOT: [0] * NUM_ROWS,
        }
    )
    rows.init(
        torch.from_numpy(table).to(DEVICE),
        integers(computed.tolist()),
        integers([1] * NUM_ROWS),
        integers([[0]] * NUM_ROWS, torch.int64),
        greedy_parameters(NUM_ROWS),
    )
    wanted = [
        max(0, max_proposal_len(n, asked, r, limit, min_context))
        for n, asked, r, limit in zip(
            computed.tolist(), most.tolist(), reserved.tolist(), limits.tolist()
        )
    ]
    assert rows.room.tolist() == wanted
    assert 0 in wanted and NUM_TOKENS in wanted and len(set(wanted)) > 4
