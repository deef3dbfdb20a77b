"""Acceptance probabilities of a step's draft tokens, from which the controller learns.

The test accepts a draft token x with probability min(1, p(x) / q(x)) (arXiv 2211.17192), which
does not depend on the outcomes before it. A probability teaches more than an outcome, and tokens
after a rejected one teach as well.
"""

import torch
from vllm.v1.sample import rejection_sampler

from vllm_triforce.runner_v1.sampling import softmax
from vllm_triforce.vllm_patches import swaps


class AcceptanceRecorder:
    """Context manager that records the probabilities while vLLM's rejection sampler runs."""

    def __init__(self) -> None:
        self._num_draft_tokens: list[int] = []
        self._probs = torch.empty(0)
        self._rejection_sample = rejection_sampler.rejection_sample

    def __enter__(self) -> None:
        swaps.REJECTION_SAMPLE.set(rejection_sampler, self._sample)

    def __exit__(self, *exception) -> None:
        swaps.REJECTION_SAMPLE.set(rejection_sampler, self._rejection_sample)

    def clear(self) -> None:
        """Forget the last step."""
        self._num_draft_tokens = []

    def note_routes(self, request_ids: list[str], routes: list[str]) -> None:
        """Do nothing: this test does not depend on the way of a proposal."""

    def forget(self, request_id: str) -> None:
        """Do nothing: nothing is kept by request."""

    def set(self, num_draft_tokens: list[int], probs: torch.Tensor) -> None:
        """Record a step.

        Args:
            num_draft_tokens: of each row of the batch.
            probs: [sum(num_draft_tokens)].
        """
        self._num_draft_tokens, self._probs = num_draft_tokens, probs

    def by_row(self) -> list[list[float]] | None:
        """Return the probabilities of each row's draft tokens, None if none were recorded."""
        if not self._num_draft_tokens:
            return None
        parts = self._probs.double().cpu().split(self._num_draft_tokens)
        return [part.tolist() for part in parts]

    def _sample(self, *args, **options) -> torch.Tensor:
        """Record a step's probabilities, and call vLLM's function."""
        draft_token_ids, num_draft_tokens, _, _, draft_probs, target_logits, _, sampling = args
        # A draft source's faulty distributions are not reported here: see draft_probs.py.
        if draft_probs is None or draft_probs.shape == target_logits.shape:
            is_greedy: torch.Tensor | bool = sampling.all_greedy
            if not (sampling.all_greedy or sampling.all_random):
                counts = torch.tensor(num_draft_tokens, device=target_logits.device)
                is_greedy = (sampling.temperature == 0).repeat_interleave(counts)
            probs = acceptance_probs(draft_token_ids, draft_probs, target_logits, is_greedy)
            self.set(num_draft_tokens, probs)
        return self._rejection_sample(*args, **options)


def acceptance_probs(
    draft_token_ids: torch.Tensor,  # [num_tokens]
    draft_probs: torch.Tensor | None,  # [num_tokens, vocab_size]; None for one-hot rows
    target_logits: torch.Tensor,  # [num_tokens, vocab_size], processed
    is_greedy: torch.Tensor | bool,  # [num_tokens] bool, or of all
) -> torch.Tensor:  # [num_tokens]
    """Compute the probability that the test accepts each token if it accepts those before it."""
    ids = draft_token_ids.long()[:, None]
    if is_greedy is not False:
        agrees = (target_logits.argmax(-1) == draft_token_ids).float()
        if is_greedy is True:
            return agrees
    probs = softmax(target_logits).gather(1, ids)
    if draft_probs is not None:
        probs /= draft_probs.gather(1, ids)
    probs = probs.nan_to_num(0.0).clamp(max=1.0)[:, 0]
    return probs if is_greedy is False else torch.where(is_greedy, agrees, probs)
