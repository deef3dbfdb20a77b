"""Promise: on the device, too, a head reads each token with the newest state before it."""

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.tensors import VOCAB_SIZE, config_of, integers
from vllm_triforce.kernels.pass_inputs import PassInputs
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.sources.source import HiddenStatesV2

HIDDEN, CAPACITY, SLOTS = 600, 11, 4


@pytest.fixture
def rows() -> Rows:
    return Rows(config_of(gamma=2), SLOTS, VOCAB_SIZE, DEVICE)


@pytest.fixture
def states(rows) -> HiddenStatesV2:
    """Two auxiliary layers, which the head adds."""
    return HiddenStatesV2(
        lambda aux: aux[:, :HIDDEN] + aux[:, HIDDEN:], rows, CAPACITY, HIDDEN, torch.float32, DEVICE
    )


def random_aux(num_tokens: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, HIDDEN, generator=draw).to(DEVICE) for _ in range(2)]


def test_full_passes_keep_the_newest_of_each_slot(states):
    """A decode step, a prompt that is longer than the ring, and requests without a slot."""
    expected: dict[tuple[int, int], torch.Tensor] = {}
    steps = [
        ([3, 7, 2], [0, 40, 9], [1, -1, 3]),
        ([30, 1, 2], [3, 47, 11], [1, -1, 3]),
        ([1, 12, 5], [33, 48, 13], [1, 0, 3]),
    ]
    for seed, (lengths, firsts, slots) in enumerate(steps):
        aux = random_aux(sum(lengths) + 3, seed)  # with padding
        positions = np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, lengths)])
        padded = torch.tensor([*positions, 0, 0, 0], device=DEVICE)
        states.add_full_pass(aux, padded, np.array(lengths), np.array(slots))
        by_token = np.repeat(slots, lengths)
        for token, (slot, position) in enumerate(zip(by_token, positions)):
            expected[slot, position] = aux[0][token] + aux[1][token]
    for slot, newest in ((1, 33), (0, 59), (3, 17)):
        kept = range(max(0, newest - CAPACITY + 1), newest + 1)
        kept = [p for p in kept if (slot, p) in expected]
        assert len(kept) >= 9
        found = states.before(
            torch.full((len(kept),), slot, device=DEVICE),
            torch.tensor([p + 1 for p in kept], device=DEVICE),
        )
        assert torch.equal(found, torch.stack([expected[slot, p] for p in kept]))


def test_gathers_the_states_before_the_newest_tokens(states, rows):
    """Rows of other slots, tokens of a proposal, and a padding row that is left alone."""
    draw = torch.Generator().manual_seed(0)
    states.ring.copy_(torch.randn(states.ring.shape, generator=draw))
    inputs = PassInputs(SLOTS, 3, SLOTS, DEVICE, (HIDDEN, torch.float32))
    inputs.hidden.fill_(7)
    rows.num_rows, slots, newest = 3, [2, 0, 3], [20, 1, 33]
    rows.row_metadata[:3, RowColumn.SLOT] = integers(slots)
    rows.computed[:3] = integers([18, 1, 33])
    rows.length[:3] = integers([2, 0, 0])
    rows.count.fill_(3)
    states.gather(inputs, padded_rows=4)
    hidden = inputs.hidden.view(4, 3, HIDDEN)
    for row in range(3):
        for j in range(3):
            position = newest[row] - 3 + j
            if position >= 0:
                wanted = states.ring[slots[row], position % CAPACITY]
                assert torch.equal(hidden[row, j], wanted)
    assert (hidden[3] == 7).all()


def test_a_pass_of_level_2_replaces_what_it_reads(states, rows):
    inputs = PassInputs(SLOTS, 3, SLOTS, DEVICE)
    rows.num_rows = 2
    rows.row_metadata[:2, RowColumn.SLOT] = integers([3, 1])
    inputs.positions[:6] = torch.tensor([20, 21, 22, 5, 6, 7])
    inputs.slot_mapping[:6] = torch.tensor([64, 65, -1, 80, -1, -1])  # two drafts, one, none
    aux = random_aux(SLOTS * 3, 1)
    states.add_pass(aux, inputs)
    fused = aux[0] + aux[1]
    for token, slot, position in ((0, 3, 20), (1, 3, 21), (3, 1, 5)):
        assert torch.equal(states.ring[slot, position % CAPACITY], fused[token])
    assert int((states.ring[:SLOTS] != 0).any(-1).sum()) == 3
