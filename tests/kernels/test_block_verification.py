"""vLLM's block verification (`rejection_sample_method: block`) over a proposal as level 2 hands it
up, padding included, keeps the target's joint distribution."""

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE, needs_triton

if needs_triton.mark.args[0]:
    pytest.skip(needs_triton.mark.kwargs["reason"], allow_module_level=True)

from scipy import stats
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from tests.kernels.tensors import integers
from vllm_triforce.kernels.proposals import PAD_TOKEN, DraftLogits, outer_test_rows

pytestmark = pytest.mark.thorough

VOCAB, NUM_REQUESTS = 4, 400
TEMPERATURE = 0.8


def _distributions(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of the first token, and of the second after each: [VOCAB], [VOCAB, VOCAB]."""
    return draw.dirichlet([0.7] * VOCAB), draw.dirichlet([0.7] * VOCAB, VOCAB)


def _logits(probs: np.ndarray) -> torch.Tensor:
    """As the sampler has them of the target."""
    return torch.from_numpy(np.log(probs)).float()


def _p_value(declared: float) -> float:
    """Of the joint of two tokens behind a proposal of two and a place of padding.

    Args:
        declared: power of level 2's distributions as they are handed up; 1 is the truth.
    """
    draw = np.random.default_rng(3)
    first, second = _distributions(draw)  # the target's
    draft_first, draft_second = _distributions(draw)
    tokens = np.full((NUM_REQUESTS, 3), PAD_TOKEN)
    tokens[:, 0] = draw.choice(VOCAB, NUM_REQUESTS, p=draft_first)
    tokens[:, 1] = [draw.choice(VOCAB, p=draft_second[token]) for token in tokens[:, 0]]
    target = torch.zeros(NUM_REQUESTS, 4, VOCAB)
    target[:, 0], target[:, 1] = _logits(first), _logits(second)[tokens[:, 0]]
    # What a request draws from, before the temperature; the place of padding has nothing.
    draft = torch.full((NUM_REQUESTS, 3, VOCAB), torch.nan)
    draft[:, 0] = TEMPERATURE * declared * _logits(draft_first)
    draft[:, 1] = TEMPERATURE * declared * _logits(draft_second)[tokens[:, 0]]
    handed_up = DraftLogits.allocate(draft.to(DEVICE), NUM_REQUESTS)
    states = torch.arange(NUM_REQUESTS, dtype=torch.int32, device=DEVICE)
    handed_up.slot_of_state.copy_(states), handed_up.state_of_slot.copy_(states)
    handed_up.num_proposed.fill_(2)
    starts = integers(range(0, 4 * NUM_REQUESTS + 1, 4))
    places = integers(range(4)).repeat(NUM_REQUESTS)
    rows = outer_test_rows(
        handed_up,
        states.repeat_interleave(4),
        places,
        torch.nn.functional.pad(torch.from_numpy(tokens), (1, 0)).flatten().to(DEVICE),
        torch.full((NUM_REQUESTS,), TEMPERATURE, device=DEVICE),
        torch.from_numpy(draw.integers(1 << 62, size=NUM_REQUESTS)).to(DEVICE),
    )
    sampled, num_sampled = rejection_sample(
        target.view(-1, VOCAB).to(DEVICE),
        handed_up.logits,
        rows.draft_tokens,
        starts,
        places.long(),
        rows.owners[starts[:-1]],
        rows.owners,
        rows.places,
        rows.temperature,
        rows.seeds,
        3,
        use_block_verification=True,
    )
    lengths = num_sampled.tolist()
    assert {1, 2, 3} <= set(lengths), "some proposals are accepted, some in part"
    found = np.zeros((VOCAB, VOCAB))
    for (one, other, *_), length in zip(sampled.tolist(), lengths):
        # A second token that is not there is drawn by the next full pass.
        found[one, other if length > 1 else draw.choice(VOCAB, p=second[one])] += 1
    wanted = NUM_REQUESTS * first[:, None] * second
    rare = wanted < 5
    assert (~rare).sum() >= 6
    return stats.chisquare(
        np.append(found[~rare], found[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    ).pvalue


def test_the_joint_distribution_is_the_targets():
    assert _p_value(declared=1) > 1e-3


def test_a_wrong_distribution_is_noticed():
    assert _p_value(declared=3) < 1e-6
