"""Proposals on the device: straight from level 1, and in level 3's test."""

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import counted, distributions, integers, new_counters, some_rows
from vllm_triforce.kernels.proposals import DraftLogits, extend_proposals, level3_test_rows
from vllm_triforce.kernels.row_table import StateColumn
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
    rows.table[:3, StateColumn.HAS_NAN] = torch.tensor(faults, dtype=torch.int32)
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
    assert rows.slot_disabled[:3].tolist() == [0, 1, 0]
    assert counted(counters) == {DeviceCounter.NUM_NAN_REQUESTS: 1}


def test_rows_of_level_3s_test_have_their_own_requests_distributions():
    """Of four requests with two slots: sampled, with two of three tokens proposed; one whose slot
    is another's by now; a greedy one; and one that never had a slot."""
    num_slots, num_places = 2, 3
    handed_up = DraftLogits(torch.zeros(num_slots, num_places, 50, device=DEVICE), 4)
    handed_up.num_proposed.copy_(integers([2, 3, 1, 0]))
    handed_up.slot_of_state.copy_(integers([1, 0, 0, 0]))
    handed_up.state_of_slot.copy_(integers([2, 0]))
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.5], device=DEVICE)
    rows = level3_test_rows(
        handed_up,
        integers([0, 0, 0, 0, 1, 1, 2, 2, 2, 3]),
        integers([0, 1, 2, 3, 0, 1, 0, 1, 2, 0]),
        integers(range(10, 20)),
        temperature,
        integers([50, 51, 52, 53], torch.int64),
    )
    assert rows.owners.tolist() == [1] * 4 + [num_slots + 1] * 2 + [0] * 3 + [num_slots + 3]
    unread = num_places
    assert rows.places.tolist() == [0, 1, unread, unread, unread, unread, 0, 1, 2, unread]
    assert rows.draft_tokens.tolist() == [10, 11, 12, -1, 14, -1, 16, 17, -1, 19]
    assert rows.temperature.tolist() == [0.0, 1.0, *temperature.tolist()]
    assert rows.seeds.tolist() == [52, 50, 50, 51, 52, 53]
