"""Proposals on the device: straight from level 1, and in level 3's test."""

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from tests.kernels.device import DEVICE
from tests.kernels.tensors import counted, distributions, integers, new_counters, some_rows
from vllm_triforce.kernels.proposals import (
    DraftLogits,
    extend_proposals,
    level3_test_rows,
)
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
    assert rows.slot_disabled[:3].tolist() == [0, 1, 0]
    assert counted(counters) == {DeviceCounter.NUM_NAN_REQUESTS: 1}


MAX_REQS, NUM_SLOTS, PLACES, VOCAB = 12, 4, 3, 50


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_a_table_of_all_requests(seed, block):
    """Compare with vLLM's own test of a table by state, and -1 for missing drafts."""
    draw = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(shape, generator=draw).to(DEVICE)

    states = torch.randperm(MAX_REQS, generator=draw)[:7]
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3])[
        torch.randint(4, (MAX_REQS,), generator=draw)
    ].to(DEVICE)
    seeds = torch.arange(MAX_REQS, dtype=torch.int64, device=DEVICE) * 7919 + seed
    handed_up = DraftLogits(some(NUM_SLOTS, PLACES, VOCAB), MAX_REQS)
    by_state = torch.full((MAX_REQS, PLACES, VOCAB), torch.nan, device=DEVICE)
    proposed = [0] * MAX_REQS
    # More have had a slot than there are: the earlier owners' distributions are gone.
    for turn, state in enumerate(states[:6].tolist()):
        slot, length = turn % NUM_SLOTS, int(torch.randint(PLACES + 1, (1,), generator=draw))
        handed_up.slot_of_state[state], handed_up.state_of_slot[slot] = slot, state
        handed_up.num_proposed[state] = length
        proposed[state] = length if turn + NUM_SLOTS >= 6 else 0
        by_state[state, : proposed[state]] = handed_up.logits[slot, : proposed[state]]
    for slot, state in enumerate(handed_up.state_of_slot.tolist()):
        handed_up.logits[slot, proposed[state] :] = torch.nan  # shows where it is read
    num_drafts = [int(n) for n in torch.randint(PLACES + 1, (7,), generator=draw)]
    owners, places, tokens, tested = [], [], [], []
    for state, drafts in zip(states.tolist(), num_drafts):
        for place in range(drafts + 1):
            token = int(torch.randint(VOCAB, (1,), generator=draw))
            owners.append(state)
            places.append(place)
            tokens.append(token)
            tested.append(token if place <= proposed[state] else -1)
    starts = torch.tensor([0, *num_drafts]) + torch.tensor([0] + [1] * 7)
    starts = integers(starts.cumsum(0).tolist())
    target, pos = some(len(owners), VOCAB), integers([p + 10 for p in places])
    stock = by_state.nan_to_num()

    def outcome(logits, drafted, states, owners, places, temperature, seeds):
        sampled, number = rejection_sample(
            target,
            logits,
            drafted,
            starts,
            pos,
            states,
            owners,
            places,
            temperature,
            seeds,
            PLACES,
            use_block_verification=block,
        )
        return [row[:n] for row, n in zip(sampled.tolist(), number.tolist())]

    owners, places = integers(owners), integers(places)
    expected = outcome(
        stock, integers(tested), integers(states.tolist()), owners, places, temperature, seeds
    )
    rows = level3_test_rows(handed_up, owners, places, integers(tokens), temperature, seeds)
    found = outcome(
        handed_up.logits,
        rows.draft_tokens,
        rows.owners[starts[:-1]],
        rows.owners,
        rows.places,
        rows.temperature,
        rows.seeds,
    )
    assert found == expected
    assert rows.draft_tokens.tolist() == tested
