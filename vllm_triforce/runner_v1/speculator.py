"""Runner V1's speculator: makes the proposals of a step, and measures them for the controller."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.controller import Candidate, Controller
from vllm_triforce.controller.routes import HIERARCHICAL, PLAIN_ROUTE, Choice
from vllm_triforce.core.limits import DisabledRequests
from vllm_triforce.core.loop import Observer, propose
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.runner_v1.batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.levels import (
    Level1,
    LevelsV1,
    Matches,
    RoutedDraft,
    match_classes,
    start_round,
)
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.sampling import InnerNoise
from vllm_triforce.runner_v1.sources.source import Draft
from vllm_triforce.runner_v1.verification import Verified

# Tokens of a direct draft where its plan has fewer and a rule may end it. Room for more would make
# the draft's window start anew more often.
_LONGEST = 8


class SpeculatorV1:
    """Proposes by levels 1 and 2, or directly by level 1, as the controller chooses."""

    def __init__(
        self,
        level1: Level1,
        level2: RetrievalLevel | None,
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
        """Propose up to ``batch.max_num_tokens`` tokens for each request."""
        proposal = Proposal.empty(len(batch))
        matches = self.level1.find_matches(batch, proposal, list(range(len(batch))))
        candidates = self._candidates(batch, matches)
        choices = self.controller.choose(candidates, batch.num_plain_reqs)
        proposal.num_planned = [choice.num_tokens for choice in choices]
        proposal.routes = [choice.route for choice in choices]
        rows = [row for row, choice in enumerate(choices) if choice.route == HIERARCHICAL]
        if rows:
            self._propose_by_levels(batch, proposal, rows, [choices[r].num_tokens for r in rows])
        self._propose_directly(batch, proposal, candidates, choices, matches)
        self.counters.num_nan_requests = self.disabled_requests.num_disabled
        self.counters.num_direct_proposals += sum(
            bool(token_ids) and choice.route != HIERARCHICAL
            for token_ids, choice in zip(proposal.token_ids, choices)
        )
        self.counters.add_proposal([token_ids for token_ids in proposal.token_ids if token_ids])
        return proposal

    def _candidates(self, batch: DraftBatch, matches: Matches) -> list[Candidate]:
        return [
            Candidate(
                request_id,
                batch.num_computed_tokens[row],
                batch.max_num_tokens[row],
                match_classes(matches, row),
                batch.has_seed(row),
                batch.is_greedy[row],
            )
            for row, request_id in enumerate(batch.request_ids)
        ]

    def _propose_by_levels(
        self, batch: DraftBatch, proposal: Proposal, rows: list[int], lengths: list[int]
    ) -> None:
        assert self.level2 is not None
        part = batch.take(rows, lengths)
        observer = ObserverV1(self, self.level2, part)
        levels = LevelsV1(part, self.level1, self.level2, self.noise, self.disabled_requests)
        propose(levels, observer)
        if not observer.is_typical:
            self.controller.forget_plan()
        for row, token_ids, probs in zip(rows, levels.proposal.token_ids, levels.proposal.probs):
            proposal.token_ids[row], proposal.probs[row] = token_ids, probs

    def _propose_directly(
        self,
        batch: DraftBatch,
        proposal: Proposal,
        candidates: list[Candidate],
        choices: list[Choice],
        matches: Matches,
    ) -> None:
        """Propose level 1's drafts for the requests whose route skips level 2."""
        rows_by_source: dict[str, list[int]] = {}
        for row, choice in enumerate(choices):
            if choice.route not in (HIERARCHICAL, PLAIN_ROUTE):
                rows_by_source.setdefault(choice.route, []).append(row)
        if not rows_by_source:
            return
        start = time.perf_counter()
        for name, rows in rows_by_source.items():
            num_planned = max_tokens = [choices[row].num_tokens for row in rows]
            row_matches = [matches[name][row] for row in rows]
            drafting, rule, sampling = [candidates[row] for row in rows], None, None
            source = self.level1.sources[name]
            if source.needs_model:
                sampling = start_round(self.noise, batch, proposal, rows)
            if source.stops_early:
                num_others = len(batch) - len(rows) + batch.num_plain_reqs
                rule = self.controller.rule_for_direct_draft(name, drafting, num_others)
            if rule is not None:
                max_tokens = [
                    n if c.has_seed else min(c.max_tokens, max(n, _LONGEST))
                    for c, n in zip(drafting, num_planned, strict=True)
                ]
            draft = self.level1.draft_from(
                source, batch, proposal, rows, max_tokens, row_matches, sampling, self.noise, rule
            )
            if rule is not None:
                self.controller.on_draft_end(drafting, num_planned, rule, draft.num_passes)
                for row, classes, c in zip(rows, rule.classes, drafting):
                    if not c.has_seed:
                        proposal.num_planned[row] = len(classes)
            self._add_direct_draft(batch, proposal, rows, draft)
        self.counters.add_time("level 1", time.perf_counter() - start)

    def _add_direct_draft(
        self, batch: DraftBatch, proposal: Proposal, rows: list[int], draft: Draft
    ) -> None:
        if draft.reads_window:
            self.controller.forget_plan()
        for i, row in enumerate(rows):
            token_ids = draft.token_ids[i]
            probs = None if draft.probs is None else draft.probs[i]
            proposal.extend(row, token_ids, [None] * len(token_ids) if probs is None else probs)
        for i in draft.nan_rows:
            self.level1.clean(batch.request_ids[rows[i]])
            self.disabled_requests.disable(batch.request_ids[rows[i]], "level 1's (the draft's)")

    def release(self, request_id: str) -> None:
        self.disabled_requests.discard(request_id)
        self.controller.release(request_id)
        self.level1.release(request_id)
        if self.level2 is not None:
            self.level2.cache.release(request_id)

    def held_requests(self) -> dict[str, int]:
        return {
            "level 1": self.level1.num_requests,
            "level 2": 0 if self.level2 is None else len(self.level2.cache),
            "controller": self.controller.num_requests,
            "disabled": len(self.disabled_requests),
        }


class ObserverV1(Observer):
    """Measures one proposal of levels 1 and 2 for the counters and the controller."""

    def __init__(self, speculator: SpeculatorV1, level2: RetrievalLevel, batch: DraftBatch) -> None:
        self._batch = batch
        self._controller, self._counters = speculator.controller, speculator.counters
        self._seconds: dict[str, float] = {}
        # A request's first selection reads its whole context, so that this proposal's time
        # predicts no later one's.
        self._is_first = not all(request_id in level2.cache for request_id in batch.request_ids)
        self.is_typical = not self._is_first

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._seconds[name] = seconds
        self._counters.add_time(name, seconds)

    def on_round_end(self, rows: list[int], draft: RoutedDraft, verified: Verified) -> None:
        """Count a round; report its acceptance and, if it is typical, its time."""
        self._counters.add_inner_round(draft.token_ids, verified.num_accepted)
        if (costs := self._controller.measured) is not None:
            acceptance, sources = self._controller.acceptance, draft.sources
            lengths = list(map(len, draft.token_ids))
            for i, row in enumerate(rows):
                num_accepted = verified.num_accepted[i]
                acceptance.observe_rounds(
                    self._batch.request_ids[row],
                    sources[i],
                    draft.match_classes[i],
                    1,
                    num_accepted,
                    int(num_accepted < lengths[i]),
                )
            if not (self._is_first or draft.reads_window):
                level2_s = self._seconds["level 2"] + self._seconds["verification"]
                costs.observe_level2(len(rows), max(lengths) + 1, 0, level2_s)
                if num_drafting := sum(name in acceptance.with_passes for name in sources):
                    drafts_s = draft.num_passes * costs.draft(num_drafting)
                    costs.observe_level1(drafts_s, self._seconds["level 1"])
        self._is_first = False
        self.is_typical = self.is_typical and not draft.reads_window
