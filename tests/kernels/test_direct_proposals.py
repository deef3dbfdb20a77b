"""Promise: what level 1 drafts becomes a proposal as it is, as far as there is room for it."""

import pytest
import torch

from tests.kernels.tensors import counted, distributions, new_counters, some_rows
from vllm_triforce.kernels.proposals import extend_proposals
from vllm_triforce.metrics.counters import DeviceCounter


def extended(num_drafted, room, faults=(0, 0, 0), logits=None):
    """Extend three rows, of which the second has two tokens already."""
    rows = some_rows(
        3,
        gamma=3,
        proposal=-7,
        length=[0, 2, 0],
        room=room,
        drafted=[[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        num_drafted=num_drafted,
    )
    rows.has_nan[:3] = torch.tensor(faults, dtype=torch.int32)
    counters = new_counters()
    drawn = None if logits is None else distributions(logits, torch.ones(3))
    extend_proposals(rows, drawn, counters)
    lengths = rows.length.tolist()
    return rows, [rows.proposal[i, : lengths[i]].tolist() for i in range(3)], counters


def test_drafts_are_appended_as_far_as_there_is_room():
    rows, proposals, counters = extended(num_drafted=[3, 3, 3], room=[6, 4, 0])
    assert proposals == [[1, 2, 3], [-7, -7, 4, 5], []]
    assert rows.num_emitted[:3].tolist() == [3, 2, 0]
    assert rows.room[:3].tolist() == [6, 4, 0], "there may be more to come"
    assert (rows.proposal[0, 3:] == -7).all() and not counted(counters)


def test_a_source_that_drafts_less_has_no_more():
    rows, proposals, _ = extended(num_drafted=[0, 2, 3], room=[6, 6, 6])
    assert proposals == [[], [-7, -7, 4, 5], [7, 8, 9]]
    assert rows.room[:3].tolist() == [0, 4, 6]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_nan_ends_the_proposal(wrong):
    """Drafts before the NaN stay: dropping a token for what followed would bias it."""
    logits = torch.zeros(3, 3, 11)
    logits[1, wrong:, 5] = torch.nan
    rows, proposals, counters = extended([3] * 3, [6] * 3, (0, 1, 0), logits)
    assert proposals == [[1, 2, 3], [-7, -7, *[4, 5, 6][:wrong]], [7, 8, 9]]
    assert rows.room[:3].tolist() == [6, 2 + wrong, 6]
    assert rows.slot_disabled.tolist() == [0, 1, 0]
    assert counted(counters) == {DeviceCounter.NUM_NAN_REQUESTS: 1}
