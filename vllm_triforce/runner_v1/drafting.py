"""Level 1: drafts each row's tokens from the source that the controller chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from vllm_triforce.controller import Controller
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.sources.source import Draft, DraftSource, Match


@dataclass
class Matches:
    """Each source's matches for some rows."""

    by_source: Mapping[str, Sequence[Match | None]]

    def confidence(self, i: int) -> dict[str, int]:
        """Return the confidence of each source that has tokens for the ``i``-th row."""
        row_matches = {name: matches[i] for name, matches in self.by_source.items()}
        return {name: match.confidence for name, match in row_matches.items() if match is not None}


@dataclass
class RoutedDraft:
    """Draft and the source of each row, None for rows without one."""

    draft: Draft
    sources: list[str | None]
    confidences: list[int | None]
    with_model: list[bool]
    """True for rows whose tokens took passes of the draft model."""


class Level1:
    """Drafts for level 2, or directly for level 3.

    Args:
        sources: the preferred one first; the others are used if the controller chooses lengths.
        vocab_size: the target's vocabulary size.
    """

    def __init__(
        self, sources: Sequence[DraftSource], controller: Controller, vocab_size: int
    ) -> None:
        self.sources = {source.name: source for source in sources}
        self._traits = {source.name: source.traits() for source in sources}
        self._controller = controller
        self._vocab_size = vocab_size

    def draft(self, batch, proposal, rows, max_tokens, sampling, noise) -> RoutedDraft:
        """Draft at most ``max_tokens[i]`` tokens for level 2, to follow ``rows[i]``'s proposal."""
        matches = self.find_matches(batch, proposal, rows)
        confidences = [matches.confidence(i) for i in range(len(rows))]
        choices = [
            self._controller.choose_draft(
                batch.request_ids[row], batch.has_seed(row), confidence, len(rows), row_max
            )
            for row, confidence, row_max in zip(rows, confidences, max_tokens)
        ]
        draft = self.draft_from_sources(choices, matches, batch, proposal, rows, sampling, noise)
        sources = [source for source, _ in choices]
        return RoutedDraft(
            draft,
            sources,
            [
                None if name is None else self._traits[name].confidence(confidence)
                for name, confidence in zip(sources, confidences)
            ],
            [name is not None and self.sources[name].needs_model for name in sources],
        )

    def find_matches(self, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> Matches:
        """Find the matches of every source that may be used."""
        sources = list(self.sources.values())
        if "gamma" not in self._controller.chooses:
            sources = sources[:1]
        return Matches({s.name: s.find_matches(batch, proposal, rows) for s in sources})

    def draft_from_sources(
        self,
        choices: Sequence[tuple[str | None, int]],  # source and number of tokens, per row
        matches: Matches,
        batch: DraftBatch,
        proposal: Proposal,
        rows: Sequence[int],
        sampling,
        noise,
    ) -> Draft:
        """Draft each row's tokens from its source."""
        merged = Draft.empty(len(rows))
        for name, source in self.sources.items():
            max_tokens = [count if chosen == name else 0 for chosen, count in choices]
            if not any(max_tokens):
                continue
            source_matches = matches.by_source[name]
            draft = source.draft(batch, proposal, rows, max_tokens, source_matches, sampling, noise)
            self._truncate(source, draft, max_tokens)
            merged.copy_rows(draft, [i for i, count in enumerate(max_tokens) if count])
        return merged

    def draft_directly(
        self,
        name: str,
        batch: DraftBatch,
        proposal: Proposal,
        rows: list[int],
        max_tokens: list[int],
        matches: Sequence[Match | None],  # of ``rows``
        noise: InnerNoise,
    ) -> Draft:
        """Draft ``max_tokens[i]`` tokens for level 3, all from one source."""
        source, sampling = self.sources[name], None
        if source.needs_model:
            start_noise(noise, batch, proposal, rows)
            sampling = batch.sampling.take(rows)
        draft = source.draft(batch, proposal, rows, max_tokens, matches, sampling, noise)
        self._truncate(source, draft, max_tokens)
        return draft

    def _truncate(self, source: DraftSource, draft: Draft, max_tokens: Sequence[int]) -> None:
        """Cut drafts at the slots' end and at the first id outside the vocabulary."""
        if source.needs_model:
            return
        # Sources come from other packages too and are not trusted.
        for i, (token_ids, count) in enumerate(zip(draft.token_ids, max_tokens)):
            valid_ids = takewhile(lambda token: 0 <= token < self._vocab_size, token_ids[:count])
            draft.token_ids[i] = [int(token) for token in valid_ids]

    @property
    def model(self) -> DraftSource | None:
        """Source with the draft model, None if there is none."""
        return next((source for source in self.sources.values() if source.needs_model), None)

    def num_uncached_tokens(self, request_id: str, num_tokens: int) -> int:
        """Return how many tokens level 1 must read to draft after ``num_tokens`` tokens."""
        return max(
            source.num_uncached_tokens(request_id, num_tokens) for source in self.sources.values()
        )

    @property
    def num_requests(self) -> int:
        """Number of requests with state in a source."""
        return max(source.num_requests for source in self.sources.values())

    def clean(self, request_id: str) -> None:
        """Remove NaN from a request's state."""
        for source in self.sources.values():
            source.clean(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request that has left the engine."""
        for source in self.sources.values():
            source.release(request_id)


def start_noise(noise: InnerNoise, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> None:
    """Start each row's noise at its place in the sequence."""
    seeds = [batch.sampling.seeds[row] for row in rows] if batch.sampling.seeds else []
    noise.begin(seeds, [(batch.num_computed_tokens[r], len(proposal.token_ids[r])) for r in rows])
