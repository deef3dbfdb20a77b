"""Level 1's sources: a draft model and prompt lookup, the better one for each request and round."""

from dataclasses import dataclass

from vllm_triforce.controller import Controller
from vllm_triforce.controller.choice import Route
from vllm_triforce.host.draft_batch import DraftBatch, Proposal
from vllm_triforce.host.level1 import Drafted
from vllm_triforce.host.prompt_lookup import Match, find_match, follow
from vllm_triforce.host.streaming import StreamingLevel


@dataclass
class SourcedDraft:
    """What was drafted for each row, and from which source."""

    drafted: Drafted
    sources: list[Route]
    match_lengths: list[int]


class Level1Sources:
    """Drafts for level 2, or straight for level 3.

    Args:
        draft: level 1 with a model; None for prompt lookup alone.
        max_ngram: longest n-gram that prompt lookup looks for.
    """

    def __init__(self, draft: StreamingLevel | None, max_ngram: int, controller: Controller):
        self.model = draft
        self._max_ngram = max_ngram
        self._controller = controller

    def matches(self, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> list[Match | None]:
        """What prompt lookup finds, where it may be used."""
        if self.model is not None and "gamma" not in self._controller.chooses:
            return [None] * len(rows)
        return [find_match(batch.context(proposal, row), self._max_ngram) for row in rows]

    def draft(self, batch, proposal, rows, most, sampling, noise) -> SourcedDraft:
        """Drafts at most ``most[i]`` tokens for a pass of level 2, after what is proposed for
        ``rows[i]``; arguments as ``StreamingLevel.draft``."""
        matches = self.matches(batch, proposal, rows)
        lengths = [match.length if match else 0 for match in matches]
        chosen = [
            self._controller.level1(
                batch.request_ids[row], batch.has_seed(row), length, len(rows), room
            )
            for row, length, room in zip(rows, lengths, most)
        ]
        with_model = [count if route is Route.DRAFT else 0 for route, count in chosen]
        if any(with_model):
            drafted = self.model.draft(batch, proposal, rows, with_model, sampling, noise)
        else:
            drafted = Drafted([[] for _ in rows])
        for i, (route, count) in enumerate(chosen):
            if route is Route.LOOKUP and count and matches[i] is not None:
                drafted.token_ids[i] = follow(batch.context(proposal, rows[i]), matches[i], count)
                if drafted.probs is not None:
                    drafted.probs[i] = None
        return SourcedDraft(drafted, [route for route, _ in chosen], lengths)

    def propose_from_match(self, batch, proposal, row: int, match: Match, count: int) -> None:
        """Proposes what followed a match; each token is certain."""
        proposal.token_ids[row] = follow(batch.token_ids[row], match, count)
        if proposal.probs is not None:
            proposal.probs[row] = [None] * count

    def tokens_behind(self, request_id: str, num_tokens: int) -> int:
        """Tokens that the draft model has to read before it can draft; 0 where there is none."""
        return 0 if self.model is None else self.model.tokens_behind(request_id, num_tokens)

    @property
    def num_requests(self) -> int:
        return 0 if self.model is None else self.model.num_requests

    def clean(self, request_id: str) -> None:
        if self.model is not None:
            self.model.clean(request_id)

    def release(self, request_id: str) -> None:
        if self.model is not None:
            self.model.release(request_id)
