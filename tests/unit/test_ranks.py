"""Promise: tensor parallel ranks decide alike with any number of threads. That they launch alike
whenever each sees a NaN is said in ``tests/parity`` (nan-*): rows and slots follow the plan."""

import pytest
import torch

from vllm_triforce.runner_v1.rejection import acceptance_probs
from vllm_triforce.runner_v1.sampling import InnerNoise, SamplingRows
from vllm_triforce.runner_v1.sources.draft_model import DraftModel
from vllm_triforce.runner_v1.sources.source import Draft
from vllm_triforce.runner_v1.verification import verify

CPU = torch.device("cpu")


class AllConfident:
    """Rule that ends no draft and notes what it is asked with."""

    def __init__(self) -> None:
        self.top_probs: list[float] = []

    def keeps(self, row: int, top_prob: float) -> bool:
        self.top_probs.append(top_prob)
        return True


def decided(logits: torch.Tensor, sampling: SamplingRows, num_threads: int) -> list:
    """Return all that a rank decides tokens, lengths and controller by, from gathered logits.

    Args:
        logits: [2, vocab_size].
    """
    torch.set_num_threads(num_threads)
    noise, rule, draft = InnerNoise(0, CPU), AllConfident(), Draft([[]], [[]])
    noise.begin([], [(0, 0)])
    if sampling.all_greedy:
        draft.probs = None
    DraftModel._sample(None, logits[:1].clone(), [0], sampling, noise, draft, rule)
    verified = verify(draft.token_ids, draft.probs, logits.flip(0), sampling, noise)
    probs = None if draft.probs is None else torch.stack(draft.probs[0])
    chances = acceptance_probs(torch.tensor([5]), probs, logits[1:], is_greedy=False)
    exported = [p.numpy().tobytes() for p in verified.probs[0]]
    return [draft.token_ids, rule.top_probs, verified.token_ids, exported, chances.tolist()]


@pytest.mark.parametrize(
    "temperature, top_p, num_seeds", [(0.0, None, 60), (1.0, None, 30), (0.8, 0.9, 10)]
)
def test_ranks_with_other_numbers_of_threads_decide_alike(temperature, top_p, num_seeds):
    """Torch splits some sums among threads, which changes their last bits."""
    num_threads = torch.get_num_threads()
    top_p = None if top_p is None else torch.tensor([top_p])
    sampling = SamplingRows(torch.tensor([temperature]), top_p=top_p)
    try:
        for seed in range(num_seeds):
            logits = 5 * torch.randn(2, 128_256, generator=torch.Generator().manual_seed(seed))
            one, *others = (decided(logits, sampling, threads) for threads in (1, 2, 3))
            assert all(other == one for other in others)
    finally:
        torch.set_num_threads(num_threads)
