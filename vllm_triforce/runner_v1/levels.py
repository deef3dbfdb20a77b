"""Levels 1 and 2 of Runner V1. Rows are ragged, and finished rows drop out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from vllm_triforce.controller import Controller
from vllm_triforce.controller.draft_lengths import StopRule
from vllm_triforce.controller.routes import MatchClass
from vllm_triforce.core.limits import DisabledRequests
from vllm_triforce.runner_v1.batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.sampling import InnerNoise, SamplingRows
from vllm_triforce.runner_v1.sources.source import Draft, DraftSource, Match
from vllm_triforce.runner_v1.verification import Verified, verify

Matches = dict[str, Sequence[Match | None]]
"""Each source's matches for some rows."""


def match_classes(matches: Matches, i: int) -> dict[str, MatchClass | None]:
    """Return the match class of each source for the ``i``-th row, None for no tokens."""
    of_row = {name: by_row[i] for name, by_row in matches.items()}
    return {name: None if match is None else match.match_class for name, match in of_row.items()}


@dataclass
class RoutedDraft(Draft):
    """Draft, and the source of each row, None for rows without one."""

    sources: list[str | None] = field(default_factory=list)
    match_classes: list[MatchClass | None] = field(default_factory=list)


class Level1:
    """Drafts each row's tokens for level 2, or directly for level 3.

    The first of ``sources`` is preferred; the others are used if the controller chooses.
    """

    def __init__(
        self, sources: Sequence[DraftSource], controller: Controller, vocab_size: int
    ) -> None:
        self.sources = {source.name: source for source in sources}
        self._traits = {source.name: source.traits() for source in sources}
        self.model = next((source for source in sources if source.needs_model), None)
        """Source with the draft model, None if there is none."""
        self.controller = controller
        self._vocab_size = vocab_size

    def draft(self, batch, proposal, rows, max_tokens, sampling, noise) -> RoutedDraft:
        """Draft at most ``max_tokens[i]`` tokens for level 2, to follow ``rows[i]``'s proposal."""
        matches = self.find_matches(batch, proposal, rows)
        classes = [match_classes(matches, i) for i in range(len(rows))]
        choices = [
            self.controller.choose_draft(
                batch.request_ids[row], batch.has_seed(row), row_classes, len(rows), row_max
            )
            for row, row_classes, row_max in zip(rows, classes, max_tokens)
        ]
        draft = RoutedDraft.empty(len(rows))
        for name, source in self.sources.items():
            counts = [count if chosen == name else 0 for chosen, count in choices]
            if any(counts):
                its_draft = self.draft_from(
                    source, batch, proposal, rows, counts, matches[name], sampling, noise
                )
                draft.copy_rows(its_draft, [i for i, count in enumerate(counts) if count])
        draft.sources = [name for name, _ in choices]
        draft.match_classes = [
            None if name is None else self._traits[name].match_class(row_classes)
            for name, row_classes in zip(draft.sources, classes)
        ]
        return draft

    def find_matches(self, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> Matches:
        sources = list(self.sources.values())
        if not self.controller.chooses_source:
            sources = sources[:1]
        return {s.name: s.find_matches(batch, proposal, rows) for s in sources}

    def draft_from(
        self,
        source: DraftSource,
        batch: DraftBatch,
        proposal: Proposal,
        rows: Sequence[int],
        max_tokens: Sequence[int],
        matches: Sequence[Match | None],  # of ``rows``
        sampling,
        noise,
        rule: StopRule | None = None,
    ) -> Draft:
        """Draft ``max_tokens[i]`` tokens for ``rows[i]`` from one source, or up to ``rule``."""
        options = {} if rule is None or not source.stops_early else {"stop": rule}
        draft = source.draft(batch, proposal, rows, max_tokens, matches, sampling, noise, **options)
        if not source.needs_model:
            # Sources come from other packages too and are not trusted: cut drafts at the slots' end
            # and at the first id outside the vocabulary.
            for i, (token_ids, count) in enumerate(zip(draft.token_ids, max_tokens)):
                valid = takewhile(lambda token: 0 <= token < self._vocab_size, token_ids[:count])
                draft.token_ids[i] = [int(token) for token in valid]
        return draft

    @property
    def num_requests(self) -> int:
        return max(source.num_requests for source in self.sources.values())

    def clean(self, request_id: str) -> None:
        for source in self.sources.values():
            source.clean(request_id)

    def release(self, request_id: str) -> None:
        for source in self.sources.values():
            source.release(request_id)


def start_round(
    noise: InnerNoise, batch: DraftBatch, proposal: Proposal, rows: list[int]
) -> SamplingRows:
    """Start each row's noise at its place in the sequence, and return the rows' parameters."""
    sampling = batch.sampling.take(rows)
    places = [(batch.num_computed_tokens[row], len(proposal.token_ids[row])) for row in rows]
    noise.begin(sampling.seeds, places)
    return sampling


class LevelsV1:
    """Levels of one proposal (``core/loop.py``); ``batch.max_num_tokens`` are planned lengths."""

    def __init__(
        self,
        batch: DraftBatch,
        level1: Level1,
        level2: RetrievalLevel,
        noise: InnerNoise,
        disabled: DisabledRequests,
    ) -> None:
        self.batch = batch
        self.proposal = Proposal.empty(len(batch))
        self._level1, self._level2 = level1, level2
        self._config = level1.controller.config
        self._noise, self._disabled = noise, disabled

    def begin(self) -> None:
        self._level2.begin(self.batch)

    def unfinished(self) -> list[int] | None:
        request_ids = self.batch.request_ids
        rows = [
            row
            for row in range(len(request_ids))
            if self._num_missing(row) > 0 and request_ids[row] not in self._disabled
        ]
        if not rows:
            return None
        # Each pass of level 2 adds a token, hence one draft less. Of drafts beyond ``gamma``, those
        # that would make the pass larger than a step's are cut: vLLM has no larger buffers.
        longest = max(self._config.gamma, self._level2.max_tokens // len(rows) - 1)
        self._max_drafts = [min(self._num_missing(row) - 1, longest) for row in rows]
        self._sampling = start_round(self._noise, self.batch, self.proposal, rows)
        return rows

    def draft(self, rows: list[int]) -> RoutedDraft:
        return self._level1.draft(
            self.batch, self.proposal, rows, self._max_drafts, self._sampling, self._noise
        )

    def forward(self, rows: list[int], draft: RoutedDraft):
        token_ids = draft.token_ids
        logits = self._level2.forward(self.batch, self.proposal, rows, token_ids)
        places = (
            (row, row_ids[:count])
            for row, row_ids in zip(rows, token_ids)
            for count in range(len(row_ids) + 1)
        )
        return self.batch.process_logits(logits, self.proposal, places)

    def verify(self, rows: list[int], draft: RoutedDraft, logits) -> Verified:
        request_ids = self.batch.request_ids
        verified = verify(
            draft.token_ids,
            draft.probs,
            logits,
            self._sampling,
            self._noise,
            self._config.synthetic_level1_acceptance,
        )
        for row, token_ids, probs in zip(rows, verified.token_ids, verified.probs):
            self.proposal.extend(row, token_ids, probs)
        for i in draft.nan_rows:
            self._level1.clean(request_ids[rows[i]])
            self._disabled.disable(request_ids[rows[i]], "level 1's (the draft's)")
        for i in verified.nan_rows:
            self._level2.clean(self.batch, rows[i])
            self._disabled.disable(request_ids[rows[i]], "level 2's (the sparse target's)")
        return verified

    def end(self) -> None:
        """Nothing is left to do."""

    def _num_missing(self, row: int) -> int:
        return self.batch.max_num_tokens[row] - len(self.proposal.token_ids[row])
