"""What level 1 is to the levels above: anything that drafts a few tokens cheaply."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from vllm_triforce.speculator.draft_batch import DraftBatch, Proposal, SamplingRows
from vllm_triforce.verification.noise import InnerNoise


@dataclass
class Drafted:
    """Tokens drafted by level 1, a list per row, maybe empty."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor]] | None = None
    """Per row and token [vocab_size], what each was drawn from; None where each token was
    certain (prompt lookup, greedy requests)."""
    nan_rows: list[int] = field(default_factory=list)
    """Rows for which the draft's logits had a NaN; nothing is drafted for them."""


class Level1(ABC):
    @abstractmethod
    def draft(
        self,
        batch: DraftBatch,
        proposal: Proposal,
        rows: list[int],
        wanted: list[int],
        sampling: SamplingRows,
        noise: InnerNoise,
    ) -> Drafted:
        """Drafts at most ``wanted[i]`` tokens after what is proposed for ``rows[i]``.

        ``sampling`` and ``noise`` have a row for each of ``rows``.
        """

    @property
    def num_requests(self) -> int:
        """Requests that something is kept for."""
        return 0

    def clean(self, request_id: str) -> None:  # noqa: B027, most levels keep nothing
        """Removes NaN from what is kept for a request, before others can own it."""

    def release(self, request_id: str) -> None:  # noqa: B027, most levels keep nothing
        """Forgets a request."""
