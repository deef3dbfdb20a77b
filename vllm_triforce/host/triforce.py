"""TriForce's proposal: the two inner levels, nested (paper, algorithm 1)."""

import time

from vllm.logger import init_logger

from vllm_triforce.controller import Candidate, Controller
from vllm_triforce.controller.choice import Choice, Route
from vllm_triforce.host.draft_batch import DraftBatch, Proposal
from vllm_triforce.host.prompt_lookup import Match
from vllm_triforce.host.retrieval import RetrievalLevel
from vllm_triforce.host.sources import Level1Sources
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.verification.inner import verify
from vllm_triforce.verification.noise import InnerNoise

logger = init_logger("vllm.triforce")


class TriForceSpeculator:
    """Level 1 drafts, level 2 verifies, until the proposal is long enough.

    Args:
        controller: says who proposes how much, and which source level 1 takes.
    """

    def __init__(
        self,
        level1: Level1Sources,
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
        self.disabled_requests: set[str] = set()
        """Requests that are not speculated on again, because a level's logits had a NaN."""
        self._has_warned = False

    def propose(self, batch: DraftBatch) -> Proposal:
        """Proposes up to ``batch.max_num_tokens`` tokens for each request."""
        proposal = Proposal.empty(len(batch), batch.sampling.all_greedy)
        matches = self.level1.matches(batch, proposal, list(range(len(batch))))
        choices = self._choose(batch, matches)
        proposal.num_planned = [choice.num_tokens for choice in choices]
        rows = [row for row, choice in enumerate(choices) if choice.route is Route.LEVELS]
        if rows:
            self._propose_by_levels(batch, proposal, rows, [choices[r].num_tokens for r in rows])
        self._propose_directly(batch, proposal, choices, matches)
        self.counters.num_direct_proposals += sum(
            bool(tokens) and choice.route is not Route.LEVELS
            for tokens, choice in zip(proposal.token_ids, choices)
        )
        self.counters.add_proposal([tokens for tokens in proposal.token_ids if tokens])
        return proposal

    def _choose(self, batch: DraftBatch, matches: list[Match | None]) -> list[Choice]:
        greedy = batch.is_greedy or batch.sampling.is_greedy.tolist()
        candidates = [
            Candidate(
                request_id,
                batch.num_computed_tokens[row],
                batch.max_num_tokens[row],
                match.length if match else 0,
                batch.has_seed(row),
                greedy[row],
                self.level1.tokens_behind(request_id, len(batch.token_ids[row])),
                0 if self.level2.knows(request_id) else batch.num_computed_tokens[row],
                None if batch.num_left is None else batch.num_left[row],
            )
            for row, (request_id, match) in enumerate(zip(batch.request_ids, matches))
        ]
        return self.controller.choose(candidates, batch.num_plain)

    def _propose_by_levels(
        self, whole: DraftBatch, whole_proposal: Proposal, places: list[int], lengths: list[int]
    ) -> None:
        """Levels 1 and 2, for the requests at ``places``."""
        start = time.perf_counter()
        batch = whole.take(places, lengths)
        greedy = whole_proposal.probs is None
        proposal = Proposal.empty(len(batch), greedy)
        is_first = not all(self.level2.knows(request_id) for request_id in batch.request_ids)
        self.level2.begin(batch)
        seconds = time.perf_counter() - start
        self.counters.add_time("selection", seconds)
        if self.controller.measured is not None and not is_first:  # which summarises the prompt
            self.controller.measured.observe_begin(len(batch), seconds)

        def unfinished() -> list[int]:
            return [
                row
                for row, request_id in enumerate(batch.request_ids)
                if _missing(batch, proposal, row) > 0 and request_id not in self.disabled_requests
            ]

        began, is_usual, num_read = time.perf_counter(), not is_first, 0
        while rows := unfinished():
            # Each pass of level 2 adds a token of its own, hence one less to draft.
            most = [_missing(batch, proposal, row) - 1 for row in rows]
            sampling = batch.sampling.take(rows)
            self._begin_noise(batch, proposal, rows)

            start = time.perf_counter()
            sourced = self.level1.draft(batch, proposal, rows, most, sampling, self.noise)
            drafted = sourced.drafted
            drafted_at = time.perf_counter()
            logits = self.level2.forward(batch, proposal, rows, drafted.token_ids)
            forwarded_at = time.perf_counter()
            verified = verify(drafted.token_ids, drafted.probs, logits, sampling, self.noise)
            for row, tokens, probs in zip(rows, verified.token_ids, verified.probs):
                proposal.token_ids[row] += tokens
                if not greedy:
                    proposal.probs[row] += probs
            for i in drafted.nan_rows:
                self.level1.clean(batch.request_ids[rows[i]])
                self._disable(batch.request_ids[rows[i]], "level 1's (the draft's)")
            for i in verified.nan_rows:
                self.level2.clean(batch, rows[i])
                self._disable(batch.request_ids[rows[i]], "level 2's (the sparse target's)")
            verified_at = time.perf_counter()
            self.counters.add_time("level 1", drafted_at - start)
            self.counters.add_time("level 2", forwarded_at - drafted_at)
            self.counters.add_time("verification", verified_at - forwarded_at)
            self.counters.num_level2_passes += 1
            self.counters.add_inner_round(drafted.token_ids, verified.num_accepted)
            seconds = (drafted_at - start, forwarded_at - drafted_at, verified_at - forwarded_at)
            has_times = not (is_first or drafted.is_first or drafted.num_read)
            self._observe_round(batch, rows, sourced, verified.num_accepted, seconds, has_times)
            is_first, is_usual = False, is_usual and not drafted.is_first
            num_read += drafted.num_read
        if not is_usual:
            self.controller.forget_plan()
        elif num_read:
            self.controller.reads_window(num_read)
        elif self.controller.chooses:
            seconds = time.perf_counter() - began
            self.controller.observe_proposal(batch.request_ids, lengths, seconds)
        for row, place in enumerate(places):
            whole_proposal.token_ids[place] = proposal.token_ids[row]
            if not greedy:
                whole_proposal.probs[place] = proposal.probs[row]

    def _propose_directly(
        self,
        batch: DraftBatch,
        proposal: Proposal,
        choices: list[Choice],
        matches: list[Match | None],
    ) -> None:
        """Level 1 alone, for the requests that level 2 is not worth its time for."""
        with_draft = []
        for row, choice in enumerate(choices):
            if choice.route is Route.LOOKUP and matches[row] is not None:
                self.level1.propose_from_match(
                    batch, proposal, row, matches[row], choice.num_tokens
                )
            elif choice.route is Route.DRAFT:
                with_draft.append(row)
        if not with_draft:
            return
        start = time.perf_counter()
        lengths = [choices[row].num_tokens for row in with_draft]
        self._begin_noise(batch, proposal, with_draft)
        sampling = batch.sampling.take(with_draft)
        drafted = self.level1.model.draft(
            batch, proposal, with_draft, lengths, sampling, self.noise
        )
        if drafted.is_first:
            self.controller.forget_plan()
        elif drafted.num_read:
            self.controller.reads_window(drafted.num_read)
        for i, row in enumerate(with_draft):
            proposal.token_ids[row] = drafted.token_ids[i]
            if proposal.probs is not None:
                # Only greedy requests of a mixed batch: each token is certain.
                certain = [None] * len(drafted.token_ids[i])
                proposal.probs[row] = certain if drafted.probs is None else drafted.probs[i]
        for i in drafted.nan_rows:
            self.level1.clean(batch.request_ids[with_draft[i]])
            self._disable(batch.request_ids[with_draft[i]], "level 1's (the draft's)")
        self.counters.add_time("level 1", time.perf_counter() - start)

    def _begin_noise(self, batch: DraftBatch, proposal: Proposal, rows: list[int]) -> None:
        seeds = [batch.sampling.seeds[row] for row in rows] if batch.sampling.seeds else []
        self.noise.begin(
            seeds, [(batch.num_computed_tokens[r], len(proposal.token_ids[r])) for r in rows]
        )

    def _observe_round(self, batch, rows, sourced, num_accepted, seconds, has_times) -> None:
        """``has_times``: whether it took what rounds take; the first one may not, nor one in which
        the draft reads its window."""
        controller, tokens = self.controller, sourced.drafted.token_ids
        if not controller.chooses:
            return
        for row, source, length, drafted, accepted in zip(
            rows, sourced.sources, sourced.match_lengths, tokens, num_accepted
        ):
            controller.observe_round(batch.request_ids[row], source, length, len(drafted), accepted)
        if not has_times:
            return
        num_drafts = [len(t) for t, s in zip(tokens, sourced.sources) if s is Route.DRAFT]
        num_tests = sum(map(len, tokens)) + len(rows)
        is_greedy = batch.sampling.all_greedy
        controller.observe_times(
            len(rows), max(map(len, tokens)), num_drafts, num_tests, is_greedy, *seconds
        )

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

    def _disable(self, request_id: str, whose: str) -> None:
        if request_id in self.disabled_requests:
            return
        self.disabled_requests.add(request_id)
        self.counters.num_nan_requests += 1
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NaN in %s logits for request %s: it goes on without speculation, its output is "
                "not affected. Further requests are counted (vllm:triforce_nan_requests_total), "
                "not logged; check the model's weights and dtype.",
                whose,
                request_id,
            )


def _missing(batch: DraftBatch, proposal: Proposal, row: int) -> int:
    return batch.max_num_tokens[row] - len(proposal.token_ids[row])
