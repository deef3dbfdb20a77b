"""Levels 1 and 2 of Runner V1. Rows are ragged, and finished rows drop out."""

from vllm_triforce.core.eligibility import DisabledRequests
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.drafting import Level1, RoutedDraft, start_noise
from vllm_triforce.runner_v1.logits_processing import process_logits
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.verification import Verified, verify


class LevelsV1:
    """Levels of one proposal, for ``core/loop.py``.

    Args:
        batch: requests; ``max_num_tokens`` are the planned lengths.
    """

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
        # Each pass of level 2 adds a token, hence one draft less.
        self._max_drafts = [self._num_missing(row) - 1 for row in rows]
        self._sampling = self.batch.sampling.take(rows)
        start_noise(self._noise, self.batch, self.proposal, rows)
        return rows

    def draft(self, rows: list[int]) -> RoutedDraft:
        return self._level1.draft(
            self.batch, self.proposal, rows, self._max_drafts, self._sampling, self._noise
        )

    def forward(self, rows: list[int], draft: RoutedDraft):
        token_ids = draft.draft.token_ids
        logits = self._level2.forward(self.batch, self.proposal, rows, token_ids)
        places = (
            (row, row_ids[:count])
            for row, row_ids in zip(rows, token_ids)
            for count in range(len(row_ids) + 1)
        )
        return process_logits(logits, self.batch, self.proposal, places)

    def verify(self, rows: list[int], draft: RoutedDraft, logits) -> Verified:
        request_ids, level1_draft = self.batch.request_ids, draft.draft
        verified = verify(
            level1_draft.token_ids, level1_draft.probs, logits, self._sampling, self._noise
        )
        for row, token_ids, probs in zip(rows, verified.token_ids, verified.probs):
            self.proposal.extend(row, token_ids, probs)
        for i in level1_draft.nan_rows:
            self._level1.clean(request_ids[rows[i]])
            self._disabled.add(request_ids[rows[i]], "level 1's (the draft's)")
        for i in verified.nan_rows:
            self._level2.clean(self.batch, rows[i])
            self._disabled.add(request_ids[rows[i]], "level 2's (the sparse target's)")
        return verified

    def end(self) -> None:
        """Nothing is left to do."""

    def _num_missing(self, row: int) -> int:
        """Return the number of tokens between a proposal's length and its planned length."""
        return self.batch.max_num_tokens[row] - len(self.proposal.token_ids[row])
