"""Promise: tests at given acceptance rates accept at these rates, within three sigma."""

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from tests.calibration import assert_rate
from tests.kernels.device import DEVICE
from tests.kernels.tensors import some_rows
from vllm_triforce.kernels.synthetic import ACCEPT_ALL, SyntheticTest

NUM_ROWS, VOCAB = 400, 11
# Seeds that are near each other, as a user's may be.
SEEDS = torch.arange(NUM_ROWS)


@pytest.mark.parametrize("is_direct", [False, True])
def test_level_3_accepts_each_place_at_its_rate(is_direct):
    """Through vLLM's own test, of drafts that the target would never say, or always."""
    rates, direct_rate, places = [0.9, 0.5, 0.8], 0.6, 4
    rows = some_rows(NUM_ROWS, gamma=1, length=3, computed=50, seeds=SEEDS)
    rows.num_speculative_tokens = 3
    num_owners = 2 * NUM_ROWS
    synthetic = SyntheticTest(rates, direct_rate, num_owners, DEVICE)
    synthetic.draw(rows, is_direct)
    owners = torch.arange(NUM_ROWS, dtype=torch.int32, device=DEVICE).repeat_interleave(places)
    local = torch.arange(places, dtype=torch.int32, device=DEVICE).repeat(NUM_ROWS)
    tokens = torch.tensor([4, 7], device=DEVICE).repeat(NUM_ROWS // 2).repeat_interleave(places)
    synthetic.reject(tokens, owners, local)
    target = torch.full((len(owners), VOCAB), -30.0, device=DEVICE)
    target[:, 4] = 30.0
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.0], device=DEVICE).repeat(num_owners // 4)
    starts = torch.arange(0, len(owners) + 1, places, dtype=torch.int32, device=DEVICE)
    _, num_sampled = rejection_sample(
        target,
        torch.zeros(num_owners, 3, VOCAB, device=DEVICE),
        tokens,
        starts,
        local.long() + 50,
        owners[::places].contiguous(),
        owners,
        local,
        temperature,
        torch.arange(num_owners, device=DEVICE),
        3,
        torch.full((3,), ACCEPT_ALL, device=DEVICE),
    )
    accepted = num_sampled.cpu() - 1
    for place, rate in enumerate([direct_rate] * 3 if is_direct else rates):
        reached = int((accepted >= place).sum())
        assert_rate(int((accepted > place).sum()), reached, rate)
    # Greedy and sampled requests alike, and rows whose owner has no proposal keep nothing.
    assert torch.equal(accepted, synthetic.num_accepted[:NUM_ROWS].cpu().clamp(max=3))
    invented = torch.tensor([1, 2], device=DEVICE)
    synthetic.reject(invented, owners[-2:] + NUM_ROWS, local[:2])
    assert invented.tolist() == [1, -1]
