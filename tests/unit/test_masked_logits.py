"""Promise: masked logits give the distributions that ``token_distribution`` gives, in rows that
follow one another."""

from types import SimpleNamespace

import pytest
import torch

from vllm_triforce.runner_v1.sampling import token_distribution
from vllm_triforce.runner_v2.sampling import masked_logits

_MASKS = {
    "top_k": torch.tensor([3, 20, 1], dtype=torch.int32),
    "top_p": torch.tensor([0.5, 1.0, 0.9]),
    "min_p": torch.tensor([0.1, 0.0, 0.5]),
}


@pytest.mark.parametrize("vocab_size", [64, 50])
@pytest.mark.parametrize("names", [[], ["top_k"], ["top_p"], ["min_p"], list(_MASKS)])
def test_distributions(names, vocab_size):
    # A padded vocabulary's logits are a view of longer rows.
    logits = torch.randn(3, 64, generator=torch.manual_seed(0))[:, :vocab_size]
    temperature = torch.tensor([0.7, 1.0, 2.0])
    masks = {name: _MASKS[name] if name in names else None for name in _MASKS}

    masked, lse = masked_logits(logits, temperature, **masks)

    sampling = SimpleNamespace(is_greedy=temperature == 0, temperature=temperature, **masks)
    scaled = masked / temperature[:, None]
    torch.testing.assert_close(scaled.softmax(-1), token_distribution(logits, sampling))
    torch.testing.assert_close((scaled - lse[:, None]).exp(), token_distribution(logits, sampling))
    assert masked.is_contiguous() and lse.is_contiguous()
