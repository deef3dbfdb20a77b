"""Drawing and verifying on the device is what the oracle does with the same noise."""

import pytest
import torch

from tests.kernels.device import DEVICE, needs_triton

if needs_triton.mark.args[0]:
    pytest.skip(needs_triton.mark.kwargs["reason"], allow_module_level=True)

from tests.kernels import oracles
from tests.kernels.noise_probe import probe
from tests.kernels.tensors import counted, integers, new_counters
from vllm_triforce.kernels.drafting import draw_drafts
from vllm_triforce.kernels.export_proposal import export_distributions
from vllm_triforce.kernels.faults import BlockCleaner, Faults
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.row_metadata import RowColumn
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.metrics.counters import DeviceCounter

NUM_SPECULATIVE_TOKENS = 6


def no_faults(num_rows: int) -> Faults:
    row_metadata = torch.zeros(num_rows, len(RowColumn), dtype=torch.int32, device=DEVICE)
    row_metadata[:, RowColumn.SLOT] = torch.arange(num_rows)
    nothing = [0] * num_rows
    return Faults(integers(nothing), integers(nothing), row_metadata)


def some_logits(*shape: int, seed: int) -> torch.Tensor:
    """Rather sharp, with tokens that the request's parameters exclude."""
    logits = 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    excluded = torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.2
    excluded[..., 0] = False
    return logits.masked_fill(excluded, -torch.inf)


def lse(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    safe = temperature.where(temperature > 0, torch.ones(()))
    safe = safe.view(-1, *[1] * (logits.dim() - 1))
    return (logits / safe).logsumexp(-1).to(DEVICE)


@pytest.mark.parametrize(
    ("vocab_size", "gamma"), [(3, 1), (3, 5), (19, 2), (19, 5), (1177, 1), (1177, 2), (5000, 2)]
)
@pytest.mark.parametrize("certain", [False, True])
def test_verification(vocab_size, gamma, certain):
    """Rows of all kinds at once: sampled and greedy, fewer drafts than gamma, a full proposal."""
    num_rows = 24
    draw = torch.Generator().manual_seed(vocab_size + gamma)
    temperature = torch.tensor([0.0, 1.0, 0.6, 1.7] * 6)
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
    places = torch.randint(1, 100000, (num_rows,), generator=draw)

    proposal = integers([[-7] * NUM_SPECULATIVE_TOKENS] * num_rows, torch.int64)
    new_length, emitted = length.to(torch.int32).to(DEVICE), integers([9] * num_rows)
    counters = new_counters()
    race = Race(num_rows, vocab_size, DEVICE)
    verify_drafts(
        proposal,
        new_length,
        room.to(torch.int32).to(DEVICE),
        emitted,
        counters,
        drafted.to(DEVICE),
        num_drafted.to(torch.int32).to(DEVICE),
        integers([0] * num_rows),
        target.argmax(-1).to(DEVICE),
        target.amax(-1).to(DEVICE),
        no_faults(len(target)),
        target.to(DEVICE),
        lse(target, temperature),
        None if certain else draft.to(DEVICE),
        None if certain else lse(draft, temperature),
        temperature.to(DEVICE),
        seeds.to(DEVICE),
        places.to(torch.int32).to(DEVICE),
        race,
    )
    accepted = 0
    for row in range(num_rows):
        before, count = int(length[row]), int(num_drafted[row])
        if row == 5:
            assert new_length[row] == before and emitted[row] == 0
            continue
        own = places[row] + torch.arange(gamma + 1)
        chances, delays, _ = probe(
            seeds[row].repeat(gamma + 1).to(DEVICE), own.to(torch.int32).to(DEVICE), vocab_size
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
        assert proposal[row, before:end].tolist() == expected
        assert new_length[row] == end and emitted[row] == len(expected)
        assert (proposal[row, :before] == -7).all() and (proposal[row, end:] == -7).all()
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


@pytest.mark.parametrize("vocab_size", [19, 5000])
def test_all_greedy_batches_need_no_distributions(vocab_size):
    best = integers([[4, 5, 6], [1, 2, 3], [7, 8, 9]], torch.int64)
    drafted, num_drafted = integers([[4, 5], [1, 9], [9, 9]]), integers([2, 2, 0])
    proposal = integers([[0] * 6] * 3, torch.int64)
    length, emitted = integers([0, 3, 5]), integers([0, 0, 0])
    nothing = torch.zeros(3, device=DEVICE)
    verify_drafts(
        proposal,
        length,
        integers([6, 6, 6]),
        emitted,
        new_counters(),
        drafted,
        num_drafted,
        integers([0, 0, 0]),
        best,
        best.float(),
        no_faults(3),
        None,
        None,
        None,
        None,
        nothing,
        integers([0, 0, 0], torch.int64),
        integers([1, 1, 1]),
        Race(3, vocab_size, DEVICE),
    )
    assert emitted.tolist() == [3, 2, 1]
    assert proposal.tolist() == [[4, 5, 6, 0, 0, 0], [0, 0, 0, 1, 2, 0], [0, 0, 0, 0, 0, 7]]


@pytest.mark.parametrize("vocab_size", [3, 1177, 5000])
def test_drafts_are_drawn_from_level_1s_distribution(vocab_size):
    num_rows, gamma = 12, 2
    temperature = torch.tensor([0.0, 1.0, 0.6] * 4)
    logits = some_logits(num_rows, vocab_size, seed=5)
    seeds = torch.arange(num_rows) * 7919 - 30000
    places = torch.arange(num_rows) + 90
    drafted = integers([[-1] * gamma] * num_rows)
    draw_drafts(
        drafted,
        1,
        logits.argmax(-1).to(DEVICE),
        logits.amax(-1).to(DEVICE),
        no_faults(num_rows),
        logits.to(DEVICE),
        lse(logits, temperature),
        temperature.to(DEVICE),
        seeds.to(DEVICE),
        places.to(torch.int32).to(DEVICE),
        Race(num_rows, vocab_size, DEVICE),
    )
    _, _, delays = probe(seeds.to(DEVICE), places.to(torch.int32).to(DEVICE), vocab_size)
    for row in range(num_rows):
        if temperature[row] == 0:
            expected = int(logits[row].argmax())
        else:
            p1 = oracles.probabilities(logits[row], float(temperature[row]))
            expected = oracles.draw(p1, delays[row].cpu())
        assert drafted[row].tolist() == [-1, expected]


def test_frequencies_over_many_seeds():
    """The noise itself: drawing and accepting follow the distributions, over 400 seeds."""
    num_rows, target = 400, torch.tensor([[1.0, 0.0, -1.0, 0.5], [0.3, 0.3, 1.0, -2.0]])
    draft = torch.tensor([[-0.5, 1.0, 0.0, 0.2]])
    temperature = torch.ones(num_rows)
    seeds, places = torch.arange(num_rows), integers([1000] * num_rows)
    race, drafted = Race(num_rows, 4, DEVICE), integers([[0]] * num_rows)
    many_draft = draft.repeat(num_rows, 1)
    parameters = (temperature.to(DEVICE), seeds.to(DEVICE), places, race)
    best = integers([0] * num_rows, torch.int64)
    distribution = (many_draft.to(DEVICE), lse(many_draft, temperature))
    draw_drafts(drafted, 0, best, best.float(), no_faults(num_rows), *distribution, *parameters)
    many = target.repeat(num_rows, 1, 1)
    proposal, length = integers([[0, 0]] * num_rows, torch.int64), integers([0] * num_rows)
    verify_drafts(
        proposal,
        length,
        integers([2] * num_rows),
        integers([0] * num_rows),
        new_counters(),
        drafted,
        integers([1] * num_rows),
        integers([0] * num_rows),
        many.argmax(-1).to(DEVICE),
        many.amax(-1).to(DEVICE),
        no_faults(num_rows),
        many.to(DEVICE),
        lse(many, temperature),
        many_draft[:, None].contiguous().to(DEVICE),
        lse(many_draft[:, None], temperature),
        *parameters,
    )
    two = length == 2
    for tokens, logits in ((proposal[:, 0], target[0]), (proposal[two, 1], target[1])):
        expected = logits.softmax(-1) * len(tokens)
        counts = torch.bincount(tokens.cpu(), minlength=4)
        assert ((counts - expected) ** 2 / expected).sum() < 21.1  # once in 10,000, 3 degrees
    assert 0.5 < two.float().mean() < 0.95


def test_logits_that_are_not_numbers_end_the_proposal():
    """NaN at level 2 proposes nothing; NaN at level 1 is rejected and redrawn from level 2."""
    target = torch.zeros(2, 2, 5)
    target[0] = torch.nan
    draft = torch.full((2, 1, 5), torch.nan)
    length, room = integers([1, 1]), integers([6, 6])
    proposal = integers([[-7] * 6] * 2, torch.int64)
    temperature = torch.ones(2)
    faults, counters = no_faults(2), new_counters()
    verify_drafts(
        proposal,
        length,
        room,
        integers([0, 0]),
        counters,
        integers([[3], [3]]),
        integers([1, 1]),
        integers([0, 0]),
        target.argmax(-1).to(DEVICE),
        target.amax(-1).to(DEVICE),
        faults,
        target.to(DEVICE),
        lse(target, temperature),
        draft.to(DEVICE),
        lse(draft, temperature),
        temperature.to(DEVICE),
        integers([1, 2], torch.int64),
        integers([10, 10]),
        Race(2, 5, DEVICE),
    )
    assert length.tolist() == [1, 2] and room.tolist() == [1, 6]
    assert 0 <= proposal[1, 1] < 5
    assert (proposal[0] == -7).all()
    assert faults.slot.tolist() == faults.row.tolist() == [1, 0]
    assert counters[DeviceCounter.NUM_NAN_REQUESTS] == 1


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
    """Of the second request; the first and the third get what they had."""
    target = torch.full((3, 4, 9), -50.0)
    target[..., 4] = 50
    target[1, place, 2] = torch.nan
    faults, counters = no_faults(3), new_counters()
    length, room = integers([0, 0, 0]), integers([6, 6, 6])
    proposal = integers([[-7] * 6] * 3, torch.int64)
    temperatures = torch.tensor([temperature, temperature, 0.0])
    nothing = temperature == 0
    verify_drafts(
        proposal,
        length,
        room,
        integers([0] * 3),
        counters,
        integers([[4, 4, 4]] * 3),
        integers([2, 2, 2]),
        integers([0] * 3),
        target.argmax(-1).to(DEVICE),
        target.amax(-1).to(DEVICE),
        faults,
        None if nothing else target.to(DEVICE),
        None if nothing else lse(target, temperatures),
        None,
        None,
        temperatures.to(DEVICE),
        integers([1, 2, 3], torch.int64),
        integers([10, 10, 10]),
        Race(3, 9, DEVICE),
    )
    length, proposal = length.tolist(), proposal.tolist()
    assert [proposal[row][: length[row]] for row in range(3)] == [[4] * 3, left, [4] * 3]
    assert room.tolist() == [6, len(left) if found else 6, 6]
    assert faults.slot.tolist() == [0, int(found), 0]
    assert counters[DeviceCounter.NUM_NAN_REQUESTS] == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_nan_reached_is_made_finite(dtype, whole):
    """Blocks of 4 tokens, interleaved as vLLM may lay them out; only those that were written, and
    only of the row that has a fault."""
    memory = torch.ones(8, 3, 2, 5, dtype=torch.float32)
    memory[:, :, 1, 2], memory[:, :, 0, 4] = torch.nan, torch.inf
    if dtype == torch.uint8:
        memory = memory.nan_to_num(127, 127).to(dtype)
        memory[:, :, 1, 2] = 255
    memory = memory.to(dtype).to(DEVICE)
    caches = [memory[:, layer].transpose(1, 2) for layer in range(2)]
    before = memory.clone()
    faults = no_faults(2)
    faults.row[1] = 1
    # Three blocks are allocated, of a table of four.
    faults.row_metadata[:, RowColumn.RESERVED] = 12
    tables = integers([[1, 2, 3, 0], [7, 5, 6, 0]])
    cleaner = BlockCleaner(caches, 4, DEVICE)
    cleaner(faults, 2, integers([5, 5]), tables, None if whole else 20)
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


@pytest.mark.parametrize("certain", [[0, 0, 0], [1, 1, 0]])
@pytest.mark.parametrize("vocab_size", [19, 5000])
def test_distributions_are_handed_up_where_the_tokens_went(vocab_size, certain):
    draft_logits = torch.full((5, 6, vocab_size), -3.0, device=DEVICE)
    is_stale = torch.zeros(5, 6, dtype=torch.int8, device=DEVICE)
    target = some_logits(3, 3, vocab_size, seed=8).to(DEVICE)
    export_distributions(
        draft_logits,
        is_stale,
        integers([4, 0, 2]),
        target,
        integers([2, 5, 6]),
        integers([2, 3, 1]),
        torch.tensor([1.0, 0.0, 0.5], device=DEVICE),
        integers([[3] * 6, [1] * 6, [0] * 6], torch.int64),
        integers(certain) if any(certain) else None,
    )
    expected = torch.full((5, 6, vocab_size), -3.0, device=DEVICE)
    expected[4, 0:2] = target[0, :2]
    if certain[0]:
        expected[4, 0:2] = torch.full((vocab_size,), -torch.inf)
        expected[4, 0:2, 3] = 0
    expected[2, 5] = target[2, 0]
    assert torch.equal(draft_logits, expected), "a greedy row hands up none"
    assert is_stale.nonzero().tolist() == [[2, 5], [4, 0], [4, 1]]
