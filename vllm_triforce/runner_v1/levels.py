"""Levels 1 and 2 for Runner V1: rows are ragged, and those that are finished drop out."""

from vllm_triforce.core.eligibility import DisabledRequests
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.drafting import Level1, RoutedDraft, start_noise
from vllm_triforce.runner_v1.logits_processing import process_logits
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.verification import Verified, verify


class LevelsV1:
    """One proposal: ``core/loop.py``'s levels.

    Args:
        batch: ``max_num_tokens`` are the planned lengths.
        greedy: whether all requests are, those of the batch that take other ways included.
    """

    def __init__(
        self,
        batch: DraftBatch,
        greedy: bool,
        level1: Level1,
        level2: RetrievalLevel,
        noise: InnerNoise,
        disabled: DisabledRequests,
    ) -> None:
        self.batch = batch
        self.proposal = Proposal.empty(len(batch), greedy)
        self._level1, self._level2 = level1, level2
        self._noise, self._disabled = noise, disabled

    def begin(self) -> None:
        self._level2.begin(self.batch)

    def unfinished(self) -> list[int] | None:
        names = self.batch.request_ids
        rows = [
            row
            for row in range(len(names))
            if self._missing(row) > 0 and names[row] not in self._disabled
        ]
        if not rows:
            return None
        # Each pass of level 2 adds a token of its own, hence one less to draft.
        self._max_drafts = [self._missing(row) - 1 for row in rows]
        self._sampling = self.batch.sampling.take(rows)
        start_noise(self._noise, self.batch, self.proposal, rows)
        return rows

    def draft(self, rows: list[int]) -> RoutedDraft:
        return self._level1.draft(
            self.batch, self.proposal, rows, self._max_drafts, self._sampling, self._noise
        )

    def forward(self, rows: list[int], drafted: RoutedDraft):
        tokens = drafted.drafted.token_ids
        logits = self._level2.forward(self.batch, self.proposal, rows, tokens)
        places = (
            (row, its[:count]) for row, its in zip(rows, tokens) for count in range(len(its) + 1)
        )
        return process_logits(logits, self.batch, self.proposal, places)

    def verify(self, rows: list[int], drafted: RoutedDraft, logits) -> Verified:
        names, found = self.batch.request_ids, drafted.drafted
        verified = verify(found.token_ids, found.probs, logits, self._sampling, self._noise)
        for row, tokens, probs in zip(rows, verified.token_ids, verified.probs):
            self.proposal.extend(row, tokens, probs)
        for i in found.nan_rows:
            self._level1.clean(names[rows[i]])
            self._disabled.add(names[rows[i]], "level 1's (the draft's)")
        for i in verified.nan_rows:
            self._level2.clean(self.batch, rows[i])
            self._disabled.add(names[rows[i]], "level 2's (the sparse target's)")
        return verified

    def end(self) -> None:
        """Nothing is left to do."""

    def _missing(self, row: int) -> int:
        return self.batch.max_num_tokens[row] - len(self.proposal.token_ids[row])
