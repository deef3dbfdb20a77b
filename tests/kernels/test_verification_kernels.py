"""Drawing and verifying on the device is what the oracle does with the same noise."""

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.device import DEVICE
from tests.kernels.noise_probe import probe
from tests.kernels.tensors import counted, integers, level_logits, some_rows, verify
from vllm_triforce.kernels.draw import ExponentialSampler, draw_drafts
from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.proposals import DraftLogits, export_distributions
from vllm_triforce.kernels.row_table import RowColumn, StateColumn
from vllm_triforce.metrics.counters import DeviceCounter

NUM_SPECULATIVE_TOKENS = 6


def some_logits(*shape: int, seed: int) -> torch.Tensor:
    """Make sharp logits with excluded tokens."""
    logits = 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    excluded = torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.2
    excluded[..., 0] = False
    return logits.masked_fill(excluded, -torch.inf)


@pytest.mark.parametrize(("vocab_size", "gamma"), [(3, 1), (19, 5), (1177, 2), (5000, 2)])
@pytest.mark.parametrize("certain", [False, True])
def test_verification(vocab_size, gamma, certain):
    """Rows are sampled and greedy, with fewer drafts than gamma, or full."""
    num_rows = 12 if gamma == 5 else 24  # of many drafts each, fewer do
    draw = torch.Generator().manual_seed(vocab_size + gamma)
    temperature = torch.tensor([0.0, 1.0, 0.6, 1.7] * (num_rows // 4))
    target = some_logits(num_rows, gamma + 1, vocab_size, seed=gamma)
    # A draft that agrees with the target to some degree, so that all outcomes occur.
    draft = target[:, :gamma] + 0.7 * torch.randn(num_rows, gamma, vocab_size, generator=draw)
    likely = torch.stack(
        [
            (draft[row] / (temperature[row] or 1e-3)).softmax(-1).multinomial(1, generator=draw)
            for row in range(num_rows)
        ]
    )
    drafted = likely.squeeze(-1).to(torch.int32)
    num_drafted = torch.randint(0, gamma + 1, (num_rows,), generator=draw)
    length = torch.randint(0, NUM_SPECULATIVE_TOKENS, (num_rows,), generator=draw)
    num_drafted = torch.minimum(num_drafted, NUM_SPECULATIVE_TOKENS - length - 1)
    room = torch.full((num_rows,), NUM_SPECULATIVE_TOKENS)
    room[5] = length[5]  # finished
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=draw)
    token_positions = torch.randint(1, 100000, (num_rows,), generator=draw)
    begins = token_positions - 1 - length
    rows = some_rows(
        num_rows,
        gamma,
        NUM_SPECULATIVE_TOKENS,
        proposal=-7,
        length=length,
        room=room,
        num_emitted=9,
        drafted=drafted,
        num_drafted=num_drafted,
        computed=begins,
        temperature=temperature,
        seeds=seeds,
    )
    counters = verify(rows, target, temperature, None if certain else draft)
    accepted = 0
    for row in range(num_rows):
        before, count = int(length[row]), int(num_drafted[row])
        if row == 5:
            assert rows.length[row] == before and rows.num_emitted[row] == 0
            continue
        own = token_positions[row] + torch.arange(gamma + 1)
        chances, delays, _ = probe(
            seeds[row].repeat(gamma + 1).to(DEVICE),
            begins[row].repeat(gamma + 1).to(DEVICE, torch.int32),
            own.to(DEVICE, torch.int32),
            vocab_size,
        )
        expected = oracles.verify_row(
            drafted[row, :count].tolist(),
            target[row, : count + 1],
            None if certain else draft[row, :count],
            float(temperature[row]),
            chances.tolist(),
            list(delays.cpu()),
        )
        end = before + len(expected)
        proposal = rows.proposal[row]
        assert proposal[before:end].tolist() == expected
        assert rows.length[row] == end and rows.num_emitted[row] == len(expected)
        assert (proposal[:before] == -7).all() and (proposal[end:] == -7).all()
        accepted += len(expected) - 1
    drafts = int(num_drafted.sum() - num_drafted[5])
    expected = {
        DeviceCounter.NUM_INNER_ROUNDS: num_rows - 1,
        DeviceCounter.NUM_LEVEL1_DRAFTED: drafts,
        DeviceCounter.NUM_LEVEL1_ACCEPTED: accepted,
    }
    assert counted(counters) == {counter: n for counter, n in expected.items() if n}
    if gamma > 1 and vocab_size > 3:
        assert 0 < accepted < drafts, "the cases must contain both outcomes"


@pytest.mark.parametrize("vocab_size", [3, 5000])
def test_drafts_are_drawn_from_level_1s_distribution(vocab_size):
    num_rows, gamma = 12, 2
    temperature = torch.tensor([0.0, 1.0, 0.6] * 4)
    logits = some_logits(num_rows, vocab_size, seed=5)
    seeds = torch.arange(num_rows) * 7919 - 30000
    token_positions = torch.arange(num_rows) + 90
    # The second draft behind a token of the proposal: three positions behind what is computed.
    rows = some_rows(
        num_rows,
        gamma,
        computed=token_positions - 3,
        length=1,
        drafted=-1,
        temperature=temperature,
        seeds=seeds,
    )
    draw_drafts(
        rows, 1, level_logits(logits, temperature), ExponentialSampler(num_rows, vocab_size, DEVICE)
    )
    own, begins = token_positions.to(DEVICE, torch.int32), rows.computed[:num_rows].contiguous()
    _, _, delays = probe(seeds.to(DEVICE), begins, own, vocab_size)
    for row in range(num_rows):
        if temperature[row] == 0:
            expected = int(logits[row].argmax())
        else:
            p1 = oracles.probabilities(logits[row], float(temperature[row]))
            expected = oracles.draw(p1, delays[row].cpu())
        assert rows.drafted[row].tolist() == [-1, expected]


def test_a_draft_of_logits_that_are_not_numbers_is_redrawn():
    """From level 2's, which are right: nothing is disabled."""
    count = 100
    temperature = torch.ones(count)
    rows = some_rows(
        count,
        gamma=1,
        length=1,
        room=6,
        drafted=3,
        num_drafted=1,
        computed=8,
        temperature=temperature,
        seeds=list(range(count)),
    )
    draft = torch.full((count, 1, 5), torch.nan)
    counters = verify(rows, torch.zeros(count, 2, 5), temperature, draft)
    assert (rows.length[:count] == 2).all() and (rows.room[:count] == 6).all()
    assert rows.proposal[:count, 1].bincount(minlength=5).min() > 8  # each of five has a fifth
    assert counters[DeviceCounter.NUM_NAN_REQUESTS] == rows.slot_disabled.sum() == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("place", "left", "found"),
    [
        (0, [], True),
        (1, [4], True),
        (2, [4, 4], True),  # behind what is accepted
        (3, [4, 4, 4], False),  # behind what was drafted: nothing was written there
    ],
)
def test_a_nan_at_any_place_that_was_written_is_found(temperature, place, left, found):
    """The second request has the NaN; the others keep their tokens."""
    target = torch.full((3, 4, 9), -50.0)
    target[..., 4] = 50
    target[1, place, 2] = torch.nan
    temperatures = torch.tensor([temperature, temperature, 0.0])
    rows = some_rows(
        3,
        gamma=3,
        proposal=-7,
        room=6,
        drafted=4,
        num_drafted=2,
        computed=9,
        temperature=temperatures,
        seeds=[1, 2, 3],
    )
    counters = verify(rows, target, None if temperature == 0 else temperatures)
    length, proposal = rows.length.tolist(), rows.proposal.tolist()
    assert [proposal[row][: length[row]] for row in range(3)] == [[4] * 3, left, [4] * 3]
    assert rows.room[:3].tolist() == [6, len(left) if found else 6, 6]
    assert rows.slot_disabled[:3].tolist() == [0, int(found), 0]
    assert counters[DeviceCounter.NUM_NAN_REQUESTS] == found


def test_a_rejected_draft_stays_where_nothing_else_is_likelier():
    """Equal distributions reject by rounding errors alone; here a rate rejects."""
    target, temperature = some_logits(1, 3, 9, seed=1), torch.ones(1)
    drafted = dict(drafted=torch.tensor([[4, 5]]), num_drafted=2)
    rows = some_rows(1, gamma=2, room=6, temperature=temperature, **drafted)
    verify(rows, target, temperature, target[:, :2], synthetic_rate=0.0)
    assert rows.proposal[0, : int(rows.length[0])].tolist() == [4]


def test_a_proposal_ends_with_its_last_round():
    """The first has two more rounds, the second none."""
    target = torch.full((2, 3, 9), -50.0)
    target[..., 4] = 50
    rows = some_rows(2, gamma=2, room=6, rounds_left=[3, 1], drafted=4, num_drafted=1)
    for lengths in ([2, 2], [4, 2], [6, 2]):
        verify(rows, target, None)
        assert rows.length[:2].tolist() == lengths
    assert rows.room[:2].tolist() == [6, 2]
    # None was rejected: rounds, and a token of level 1 in each.
    assert rows.outcomes[:2].tolist() == [[0, 3, 3, 0], [0, 1, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("whole", [False, True])
def test_blocks_of_a_row_with_nan_are_scrubbed(dtype, whole):
    """Only written blocks of the row with the NaN, in interleaved caches."""
    memory = torch.ones(8, 3, 2, 5, dtype=torch.float32)
    memory[:, :, 1, 2], memory[:, :, 0, 4] = torch.nan, torch.inf
    if dtype == torch.uint8:
        memory = memory.nan_to_num(127, 127).to(dtype)
        memory[:, :, 1, 2] = 255
    memory = memory.to(dtype).to(DEVICE)
    caches = [memory[:, layer].transpose(1, 2) for layer in range(2)]
    before = memory.clone()
    rows = some_rows(2, gamma=2, computed=5)
    rows.table[1, StateColumn.HAS_NAN] = 1
    # Three blocks are allocated, of a table of four.
    rows.row_metadata[:, RowColumn.RESERVED] = 12
    tables = integers([[1, 2, 3, 0], [7, 5, 6, 0]])
    cleaner = NanScrubber(caches, 4, DEVICE)
    cleaner(rows, tables, None if whole else 20)
    cleaned = [0, 5, 6, 7] if whole else [5, 6]
    for block in range(8):
        for layer in range(3):
            found, was = memory[block, layer].float(), before[block, layer].float()
            if block in cleaned and layer < 2:
                ones = was == 1
                assert (found[ones] == 1).all() and (found[~ones] == 0).all()
            else:
                assert torch.equal(found, was) or was.isnan().any()
                assert torch.equal(found.isnan(), was.isnan())


@pytest.mark.parametrize("certain", [[0, 0, 0], [1, 1, 0], None])
@pytest.mark.parametrize("vocab_size", [19, 5000])
def test_distributions_are_handed_up_where_the_tokens_went(vocab_size, certain):
    """Rows of prompt lookup, None, have no logits, and certain tokens."""
    handed_up = DraftLogits(torch.full((5, 6, vocab_size), -3.0, device=DEVICE), 9)
    target = some_logits(3, 3, vocab_size, seed=8).to(DEVICE)
    rows = some_rows(
        3,
        gamma=2,
        length=[2, 5, 6],
        num_emitted=[2, 3, 1],
        temperature=[1.0, 0.0, 0.5],
        proposal=[[3, vocab_size - 1] * 3, [1] * 6, [0] * 6],
    )
    rows.row_metadata[:3, RowColumn.SLOT] = integers([4, 0, 2])
    rows.row_metadata[:3, RowColumn.ONE_HOT] = integers(certain or [0, 0, 0])
    export_distributions(handed_up, rows, target if certain else None)
    expected = torch.full((5, 6, vocab_size), -3.0, device=DEVICE)
    expected[4, 0:2] = target[0, :2]
    expected[2, 5] = target[2, 0]
    if certain is None or certain[0]:
        expected[4, 0:2] = -torch.inf
        expected[4, 0, 3] = expected[4, 1, vocab_size - 1] = 0
    if certain is None:
        expected[2, 5] = -torch.inf
        expected[2, 5, 0] = 0
    assert torch.equal(handed_up.logits, expected), "a greedy row hands up none"
