"""What a source of level 1's tokens is; CONTRIBUTING.md tells how to add one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.routes import SourceTraits
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal


@dataclass
class Offer:
    """That a source has tokens for a request."""

    confidence: int = 0
    """Class of how likely they are to be accepted: an index into ``prior_acceptance``."""


@dataclass
class Drafted:
    """Tokens drafted by level 1, a list per row, maybe empty."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor] | None] | None = None
    """Per row and token [vocab_size], what each was drawn from; None, as a whole or for a row,
    where each token was certain (prompt lookup, greedy requests)."""
    nan_rows: list[int] = field(default_factory=list)
    """Rows for which the draft's logits had a NaN; nothing is drafted for them."""
    is_first: bool = False
    """Whether the draft read a whole window of tokens, of a request that it knew nothing of."""
    num_read: int = 0
    """Tokens of windows that it knew but was far behind of, which it read besides."""

    @classmethod
    def nothing(cls, num_rows: int) -> "Drafted":
        return cls([[] for _ in range(num_rows)])

    def take(self, other: "Drafted", rows: Sequence[int]) -> None:
        """Takes over what another source drafted for ``rows``."""
        for row in rows:
            self.token_ids[row] = other.token_ids[row]
        if other.probs is not None:
            if self.probs is None:
                self.probs = [None] * len(self.token_ids)
            for row in rows:
                self.probs[row] = other.probs[row]
        self.nan_rows += other.nan_rows
        self.is_first |= other.is_first
        self.num_read += other.num_read


@dataclass
class SourceParts:
    """What sources are built from.

    Args:
        draft: the draft model as vLLM loaded it; None where none was asked for.
        draft_layers: its attention layers by name.
    """

    vllm_config: Any
    config: ResolvedConfig
    draft: Any
    draft_layers: dict[str, Any]
    device: torch.device


class DraftSource(ABC):
    """Drafts for level 2, or straight for level 3.

    What it says can lower acceptance, and never changes output.
    """

    name: ClassVar[str]
    """Its file's, and in ``speculative_config``, key ``draft_sources``."""

    prior_acceptance: ClassVar[tuple[float, ...]]
    """Shares of its tokens that level 2 may be hoped to accept, a number for each class of
    confidence. They decide what is tried first, until it is known better."""

    needs_model: ClassVar[bool] = False
    """Whether its tokens take passes of the draft model, key ``model``."""

    @classmethod
    def build(cls, parts: SourceParts) -> "DraftSource":
        """One engine's."""
        return cls()

    @classmethod
    def traits(cls) -> SourceTraits:
        """What the controller needs to know of it."""
        return SourceTraits(cls.name, getattr(cls, "prior_acceptance", ()), cls.needs_model)

    @abstractmethod
    def offers(
        self, batch: DraftBatch, proposal: Proposal, rows: Sequence[int]
    ) -> Sequence[Offer | None]:
        """For each of ``rows`` whether it has tokens to go on with after what is proposed."""

    @abstractmethod
    def draft(
        self,
        batch: DraftBatch,
        proposal: Proposal,
        rows: Sequence[int],
        wanted: Sequence[int],
        offers: Sequence[Any],
        sampling,
        noise,
    ) -> Drafted:
        """Drafts at most ``wanted[i]`` tokens after what is proposed for ``rows[i]``.

        Args:
            wanted: 0 for rows that take theirs from elsewhere.
            offers: what ``offers()`` gave for ``rows``.
            sampling, noise: with a row for each of ``rows``.
        """

    def num_uncached_tokens(self, request_id: str, num_tokens: int) -> int:
        """Tokens that it has to read before it can go on after ``num_tokens``."""
        return 0

    @property
    def num_requests(self) -> int:
        """Requests that something is kept for."""
        return 0

    def clean(self, request_id: str) -> None:  # noqa: B027
        """Removes NaN from what is kept for a request."""

    def release(self, request_id: str) -> None:  # noqa: B027
        """Forgets a request that has left the engine."""


class TokenSource(DraftSource):
    """Goes on from a request's own tokens; each token is certain."""

    @abstractmethod
    def find(self, token_ids: np.ndarray) -> Offer | None:
        """What there is to go on with after ``token_ids``, [num_tokens], int; None: nothing."""

    @abstractmethod
    def follow(self, token_ids: np.ndarray, offer: Any, count: int) -> list[int]:
        """At most ``count`` tokens after ``token_ids``, from what ``find()`` gave for them."""

    def offers(self, batch, proposal, rows) -> list[Offer | None]:
        return [self.find(batch.context(proposal, row)) for row in rows]

    def draft(self, batch, proposal, rows, wanted, offers, sampling, noise) -> Drafted:
        drafted = Drafted.nothing(len(rows))
        for i, (row, count, offer) in enumerate(zip(rows, wanted, offers)):
            if count and offer is not None:
                drafted.token_ids[i] = self.follow(batch.context(proposal, row), offer, count)
        return drafted
