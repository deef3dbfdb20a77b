"""Interface of level 1's draft sources. CONTRIBUTING.md explains how to add one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.routes import MatchClass, SourceTraits
from vllm_triforce.runner_v1.batch import DraftBatch, Proposal


@dataclass
class Match:
    """Tokens that a source can draft for a request."""

    match_class: MatchClass = 0
    """Class of the first token's acceptance, an index into the source's ``prior_acceptance``, or of
    each token that there is."""


@dataclass
class Draft:
    """Tokens drafted by level 1, one list per row, which may be empty."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor] | None] | None = None
    """[vocab_size], per row and token, the distribution it was drawn from. None, for a row or for
    all rows, if the distributions are one-hot (prompt lookup, greedy requests)."""
    nan_rows: list[int] = field(default_factory=list)
    """Rows with a NaN in the draft's logits. They end before it."""
    reads_window: bool = False
    """True if the draft read a window, new or stale, which makes it slower than usual."""
    num_passes: int = 0
    """Passes of the draft model."""

    @classmethod
    def empty(cls, num_rows: int) -> Self:
        return cls([[] for _ in range(num_rows)])

    def copy_rows(self, other: "Draft", rows: Sequence[int]) -> None:
        """Copy ``rows`` from the draft of another source."""
        for row in rows:
            self.token_ids[row] = other.token_ids[row]
        if other.probs is not None:
            if self.probs is None:
                self.probs = [None] * len(self.token_ids)
            for row in rows:
                self.probs[row] = other.probs[row]
        self.nan_rows += other.nan_rows
        self.reads_window |= other.reads_window
        self.num_passes += other.num_passes


@dataclass
class SourceParts:
    """Everything that a source may be built from.

    Args:
        draft: draft model as loaded by vLLM; None if none is configured.
        draft_layers: attention layers of the draft, by name.
    """

    vllm_config: Any
    config: ResolvedConfig
    draft: Any
    draft_layers: dict[str, Any]


class DraftSource(ABC):
    """Drafts tokens for level 2, or directly for level 3.

    A bad source lowers acceptance. It never changes the output.
    """

    name: ClassVar[str]
    """Name of its file, and its name in the key ``draft_sources``."""

    prior_acceptance: ClassVar[tuple[float, ...]]
    """Expected share of its tokens that level 2 accepts, per match class. Each token of a
    draft is one class above the token before it, up to the last class: an accepted token makes a
    match longer. The controller starts from these numbers and replaces them by measured ones."""

    needs_model: ClassVar[bool] = False
    """True if each token takes a pass of the draft model, key ``model``."""

    stops_early: ClassVar[bool] = False
    """True if ``draft()`` takes a ``StopRule`` as ``stop``, to check before each token."""

    @classmethod
    def build(cls, parts: SourceParts) -> "DraftSource":
        """Create the source of one engine."""
        return cls()

    @classmethod
    def traits(cls) -> SourceTraits:
        """Describe the source to the controller."""
        return SourceTraits(cls.name, getattr(cls, "prior_acceptance", ()), cls.needs_model)

    @abstractmethod
    def find_matches(
        self, batch: DraftBatch, proposal: Proposal, rows: Sequence[int]
    ) -> Sequence[Match | None]:
        """Find tokens that may follow the proposal of each of ``rows``, None where there are
        none."""

    @abstractmethod
    def draft(
        self,
        batch: DraftBatch,
        proposal: Proposal,
        rows: Sequence[int],
        max_tokens: Sequence[int],
        matches: Sequence[Any],
        sampling,
        noise,
    ) -> Draft:
        """Draft at most ``max_tokens[i]`` tokens to follow the proposal of ``rows[i]``.

        Args:
            max_tokens: 0 for rows that draft from another source.
            matches: result of ``find_matches()`` for ``rows``.
            sampling, noise: one row for each of ``rows``.
        """

    def prepare_dummy(self, batch: DraftBatch) -> None:  # noqa: B027
        """Prepare dummy requests, whose drafts are timed at start-up."""

    @property
    def num_requests(self) -> int:
        """Number of requests with state in the source."""
        return 0

    def add_answer(self, request_id: str, token_ids: list[int]) -> None:  # noqa: B027
        """Take the answer of a request that has left the engine, before ``release()``."""

    def clean(self, request_id: str) -> None:  # noqa: B027
        """Remove NaN from a request's state."""

    def release(self, request_id: str) -> None:  # noqa: B027
        """Forget a request that has left the engine."""


class TokenSource(DraftSource):
    """Source that continues a request's tokens without a model. Its distributions are one-hot."""

    @abstractmethod
    def find(self, token_ids: np.ndarray) -> Match | None:
        """Find tokens that may follow ``token_ids``, [num_tokens], int; None if there are none.

        A draft ends before a ``PLACEHOLDER`` (``DraftBatch.token_ids``).
        """

    @abstractmethod
    def continue_from(self, token_ids: np.ndarray, match: Any, count: int) -> list[int]:
        """Return at most ``count`` tokens to follow ``token_ids``, from the match of ``find()``."""

    def find_matches(self, batch, proposal, rows) -> list[Match | None]:
        return [self.find(batch.context(proposal, row)) for row in rows]

    def draft(self, batch, proposal, rows, max_tokens, matches, sampling, noise) -> Draft:
        draft = Draft.empty(len(rows))
        for i, (row, count, match) in enumerate(zip(rows, max_tokens, matches)):
            if count and match is not None:
                token_ids = batch.context(proposal, row)
                draft.token_ids[i] = self.continue_from(token_ids, match, count)
        return draft
