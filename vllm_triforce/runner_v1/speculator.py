"""What a proposal took and gained, for the counters and for the controller.

TriForce's speculator for Runner V1: who proposes what, and the proposals.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.controller import Candidate, Controller
from vllm_triforce.controller.routes import LEVELS, PLAIN_ROUTE, Choice
from vllm_triforce.core.eligibility import DisabledRequests
from vllm_triforce.core.loop import propose
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.drafting import Level1, Offers, RoutedDraft
from vllm_triforce.runner_v1.levels import LevelsV1
from vllm_triforce.runner_v1.noise import InnerNoise
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.sources.source import Drafted
from vllm_triforce.runner_v1.verification import Verified


class ObserverV1:
    """Of one proposal of levels 1 and 2: ``core/loop.py``'s observer.

    Args:
        began: when it began, by ``time.perf_counter()``: what comes before the loop is counted with
            selection.
    """

    def __init__(
        self,
        batch: DraftBatch,
        level2: RetrievalLevel,
        controller: Controller,
        counters: LevelCounters,
        began: float,
    ) -> None:
        self._batch = batch
        self._controller = controller
        self._counters = counters
        self._seconds: dict[str, float] = {}
        self._began = began
        # Level 2 looks through a prompt once: what that takes is no measure of later proposals.
        self._is_first = not all(level2.knows(name) for name in batch.request_ids)
        self._is_usual, self._num_read = not self._is_first, 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._began if name == "selection" else time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._seconds[name] = seconds
        self._counters.add_time(name, seconds)
        if name == "selection" and self._controller.measured is not None and not self._is_first:
            self._controller.measured.observe_begin(len(self._batch), seconds)

    def round_ended(self, rows: list[int], sourced: RoutedDraft, verified: Verified) -> None:
        drafted = sourced.drafted
        self._counters.add_inner_round(drafted.token_ids, verified.num_accepted)
        if self._controller.chooses:
            self._learn_acceptance(rows, sourced, verified.num_accepted)
            if not (self._is_first or drafted.is_first or drafted.num_read):
                self._learn_times(rows, sourced)
        self._is_first, self._is_usual = False, self._is_usual and not drafted.is_first
        self._num_read += drafted.num_read

    def proposal_ended(self) -> None:
        if not self._is_usual:
            self._controller.forget_plan()
        elif self._num_read:
            self._controller.reads_window(self._num_read)

    def _learn_acceptance(self, rows, sourced: RoutedDraft, num_accepted: list[int]) -> None:
        for row, source, confidence, drafted, accepted in zip(
            rows,
            sourced.sources,
            sourced.confidences,
            sourced.drafted.token_ids,
            num_accepted,
        ):
            name = self._batch.request_ids[row]
            self._controller.acceptance.observe_round(
                name, source, confidence, len(drafted), accepted
            )

    def _learn_times(self, rows, sourced: RoutedDraft) -> None:
        tokens = sourced.drafted.token_ids
        self._controller.measured.observe_round(
            len(rows),
            max(map(len, tokens)),
            [len(t) for t, with_model in zip(tokens, sourced.with_model) if with_model],
            sum(map(len, tokens)) + len(rows),
            self._batch.sampling.all_greedy,
            self._seconds["level 1"],
            self._seconds["level 2"],
            self._seconds["verification"],
        )


class TriForceSpeculator:
    """Proposes by both levels, or straight from level 1, as the controller chooses.

    Args:
        controller: says who proposes how much, and which source level 1 takes.
    """

    def __init__(
        self,
        level1: Level1,
        level2: RetrievalLevel,
        controller: Controller,
        noise: InnerNoise,
        counters: LevelCounters,
    ) -> None:
        self.level1 = level1
        self.level2 = level2
        self.controller = controller
        self.noise = noise
        self.counters = counters
        self.disabled_requests = DisabledRequests()

    def propose(self, batch: DraftBatch) -> Proposal:
        """Proposes up to ``batch.max_num_tokens`` tokens for each request."""
        proposal = Proposal.empty(len(batch), batch.sampling.all_greedy)
        offers = self.level1.offers(batch, proposal, list(range(len(batch))))
        choices = self._choose(batch, offers)
        proposal.num_planned = [choice.num_tokens for choice in choices]
        rows = [row for row, choice in enumerate(choices) if choice.route == LEVELS]
        if rows:
            self._propose_by_levels(batch, proposal, rows, [choices[r].num_tokens for r in rows])
        self._propose_directly(batch, proposal, choices, offers)
        self.counters.num_nan_requests = self.disabled_requests.num_disabled
        self.counters.num_direct_proposals += sum(
            bool(tokens) and choice.route != LEVELS
            for tokens, choice in zip(proposal.token_ids, choices)
        )
        self.counters.add_proposal([tokens for tokens in proposal.token_ids if tokens])
        return proposal

    def _choose(self, batch: DraftBatch, offers: Offers) -> list[Choice]:
        greedy = batch.is_greedy or batch.sampling.is_greedy.tolist()
        candidates = [
            Candidate(
                request_id,
                batch.num_computed_tokens[row],
                batch.max_num_tokens[row],
                offers.confidence(row),
                batch.has_seed(row),
                greedy[row],
                self.level1.num_uncached_tokens(request_id, len(batch.token_ids[row])),
                0 if self.level2.knows(request_id) else batch.num_computed_tokens[row],
                None if batch.num_left is None else batch.num_left[row],
            )
            for row, request_id in enumerate(batch.request_ids)
        ]
        return self.controller.choose(candidates, batch.num_plain)

    def _propose_by_levels(
        self, whole: DraftBatch, whole_proposal: Proposal, rows: list[int], lengths: list[int]
    ) -> None:
        """Levels 1 and 2, for some of the requests."""
        began = time.perf_counter()
        batch = whole.take(rows, lengths)
        greedy = whole_proposal.probs is None
        levels = LevelsV1(
            batch, greedy, self.level1, self.level2, self.noise, self.disabled_requests
        )
        observer = ObserverV1(batch, self.level2, self.controller, self.counters, began)
        propose(levels, observer)
        observer.proposal_ended()
        whole_proposal.put(rows, levels.proposal)

    def _propose_directly(
        self, batch: DraftBatch, proposal: Proposal, choices: list[Choice], offers: Offers
    ) -> None:
        """Level 1 alone, for the requests that level 2 is not worth its time for."""
        by_source: dict[str, list[int]] = {}
        for row, choice in enumerate(choices):
            if choice.route not in (LEVELS, PLAIN_ROUTE):
                by_source.setdefault(choice.route, []).append(row)
        if not by_source:
            return
        start = time.perf_counter()
        for name, rows in by_source.items():
            wanted = [choices[row].num_tokens for row in rows]
            found = offers.by_source[name]
            drafted = self.level1.draft_directly(
                name, batch, proposal, rows, wanted, [found[row] for row in rows], self.noise
            )
            self._add_drafted(batch, proposal, rows, drafted)
        self.counters.add_time("level 1", time.perf_counter() - start)

    def _add_drafted(
        self, batch: DraftBatch, proposal: Proposal, rows: list[int], drafted: Drafted
    ) -> None:
        if drafted.is_first:
            self.controller.forget_plan()
        elif drafted.num_read:
            self.controller.reads_window(drafted.num_read)
        for i, row in enumerate(rows):
            tokens = drafted.token_ids[i]
            probs = None if drafted.probs is None else drafted.probs[i]
            proposal.extend(row, tokens, [None] * len(tokens) if probs is None else probs)
        for i in drafted.nan_rows:
            self.level1.clean(batch.request_ids[rows[i]])
            self.disabled_requests.add(batch.request_ids[rows[i]], "level 1's (the draft's)")

    def release(self, request_id: str) -> None:
        """Forgets a request that has left the engine."""
        self.disabled_requests.discard(request_id)
        self.controller.release(request_id)
        self.level1.release(request_id)
        self.level2.release(request_id)

    def held_requests(self) -> dict[str, int]:
        """How many requests each level keeps something for."""
        return {
            "level 1": self.level1.num_requests,
            "level 2": len(self.level2.cache),
            "controller": self.controller.num_requests,
            "disabled": len(self.disabled_requests),
        }
