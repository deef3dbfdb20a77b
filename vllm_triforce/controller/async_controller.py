"""Decisions that are made before the outcomes of earlier ones are known (Model Runner V2).

The scheduler decides while it schedules a step, and learns the outcome some steps later. Outputs
come when a full pass is done: the time between two outputs is that of the proposals after the
first pass, and of the pass that verifies them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from vllm_triforce.controller.controller import Controller, Planned
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.routes import HIERARCHICAL, LEVEL2_ALONE, PLAIN, Candidate, Choice

Plans = dict[str, Choice]
"""By request that proposes."""

# Deciding may take this share of the time: a decision holds for longer, but not beyond so long.
_DECIDING_SHARE, _MAX_HOLD_S = 0.05, 0.25


class RequestReport(NamedTuple):
    """Result of a request's proposal."""

    num_tokens: int
    num_rounds: int
    """Rounds of levels 1 and 2 in which the request took part."""
    level1_accepted: int
    """Number of level 1's tokens that level 2 accepted."""
    level1_rejected: int
    """Number of rounds in which level 2 rejected a token."""


class Outcome(NamedTuple):
    """Outcome of a request's proposal, by the full pass's test."""

    num_verified: int
    """Tokens of the proposal that a full pass verified."""
    num_accepted: int
    report: RequestReport


class _Pending(NamedTuple):
    """A step whose outcome is not known yet."""

    plan: Plans
    planned: Planned | None
    contexts: dict[str, int]
    untypical: set[str]
    """Requests that did not propose by the same route in the step before. Their proposals may read
    the whole context, or the draft's window."""
    has_seed: bool


class _Held(NamedTuple):
    """A decision on ``request_ids`` that holds for further steps, ``until`` a time on the clock."""

    plan: Plans
    request_ids: set[str]
    planned: Planned | None
    until: float


class AsyncController:
    """Controller of a scheduler that runs ahead of its worker.

    The scheduler waits for decisions, which take longer with more requests. So a decision holds for
    some steps, which keeps deciding at a twentieth of the time, unless it has a trial or a request
    with a seed. Requests that join meanwhile decode plainly.
    """

    def __init__(self, controller: Controller, source_of_levels: str | None) -> None:
        self.controller = controller
        self._source_of_levels = source_of_levels  # whose tokens go through level 2
        self._held: _Held | None = None
        self._pending: dict[int, _Pending] = {}
        self._num_steps = 0
        self._present: set[str] = set()

    def decide(
        self, request_ids: Sequence[str], candidate: Callable[[str], Candidate], num_plain: int = 0
    ) -> tuple[int, Plans]:
        """Choose the proposals after the step that is being scheduled; return its number too.

        Args:
            request_ids: of the requests that could be speculated on.
            candidate: describes one of them; most steps need none.
            num_plain: further requests of the step.
        """
        controller, number = self.controller, self._num_steps
        self._num_steps += 1
        controller.backoff.begin_step()
        joined = [
            candidate(request_id) for request_id in request_ids if request_id not in self._present
        ]
        self._present = set(request_ids)
        if any(joining.has_seed for joining in joined):
            self._held = None
            controller.seeded_request_joined()
        if not all(joining.has_seed for joining in joined):
            controller.requests_joined()
        if not request_ids or (controller.chooses and controller.backoff.is_resting):
            return number, {}
        start = self.controller.clock()
        if self._held is not None and start < self._held.until:
            controller.hold()
            return number, self._repeat(number, self._held, candidate)
        self._held = None
        candidates = [candidate(request_id) for request_id in request_ids]
        if controller.config.adaptive_keys and not controller.chooses:
            # Costs are not known yet; requests with a seed do not depend on them.
            candidates = [c for c in candidates if c.has_seed]
            num_plain += len(request_ids) - len(candidates)
        plan = self._plan(candidates, num_plain)
        if plan:
            planned = controller.take_plan()
            contexts = {c.request_id: c.context for c in candidates}
            has_seed = any(c.has_seed for c in candidates)
            self._add_pending(number, plan, planned, contexts, has_seed)
            if controller.is_steady:
                now = self.controller.clock()
                until = now + min(_MAX_HOLD_S, (now - start) / _DECIDING_SHARE)
                self._held = _Held(plan, set(request_ids), planned, until)
        return number, plan

    def _plan(self, candidates: Sequence[Candidate], num_plain: int) -> Plans:
        """Choose proposals; those by levels 1 and 2 take part in all rounds, and are lengthened.

        Requests share rounds: one that lacks tokens drafts while another has rounds left. Plan
        above the mean: the rounds run anyway, and an unused place costs one token of the full pass.
        """
        controller = self.controller
        choices = controller.choose(list(candidates), num_plain)
        shared = max((c.num_rounds for c in choices if c.route == HIERARCHICAL), default=0)
        num_more = 0 if controller.planned is None else (shared + 1) // 2
        extended = []
        for candidate, choice in zip(candidates, choices):
            if choice.route == HIERARCHICAL and not candidate.has_seed:
                longest = min(candidate.max_tokens, controller.config.num_speculative_tokens)
                num_tokens = min(longest, choice.num_tokens + num_more)
                choice = replace(choice, num_tokens=num_tokens, num_rounds=shared)
            extended.append(choice)
        if num_more:
            contexts = [candidate.context for candidate in candidates]
            before, after = ([1 + c.num_tokens for c in some] for some in (choices, extended))
            full_pass = controller.model.full_pass
            seconds = full_pass(after, contexts) - full_pass(before, contexts)
            controller.add_to_plan(sum(after) - sum(before), seconds)
        return {
            c.request_id: choice for c, choice in zip(candidates, extended) if choice is not PLAIN
        }

    def _repeat(self, number: int, held: _Held, candidate: Callable[[str], Candidate]) -> Plans:
        """Repeat a decision for the requests that are still there, as far as they have room."""
        plan, contexts, is_same = {}, {}, self._present == held.request_ids
        for request_id, choice in held.plan.items():
            if request_id not in self._present:
                continue
            described = candidate(request_id)
            contexts[request_id] = described.context
            if choice.num_tokens > described.max_tokens:
                choice, is_same = replace(choice, num_tokens=described.max_tokens), False
            plan[request_id] = choice
        if plan:
            self._add_pending(number, plan, held.planned if is_same else None, contexts)
        return plan

    def _add_pending(
        self,
        number: int,
        plan: Plans,
        planned: Planned | None,
        contexts: dict[str, int],
        has_seed: bool = False,
    ) -> None:
        before = self._pending[number - 1].plan if number - 1 in self._pending else {}
        untypical = {
            request_id
            for request_id, choice in plan.items()
            if request_id not in before or before[request_id].route != choice.route
        }
        self._pending[number] = _Pending(plan, planned, contexts, untypical, has_seed)

    @property
    def ignores_steps(self) -> bool:
        """True if nothing is learned from a step that ends now: at rest few are timed."""
        backoff = self.controller.backoff
        return backoff.is_resting and not backoff.wants_times and not self._pending

    def on_step_end(
        self,
        number: int,
        outcomes: Mapping[str, Outcome],
        proposing_seconds: Mapping[str, float],
        step: StepTime | None,
    ) -> None:
        """Learn from the output of a step, which verified the proposals after the step before.

        Args:
            outcomes: by request, of the proposals that it verified.
            proposing_seconds: of these proposals on the device, by route.
            step: its time; None if it compares with no other step.
        """
        pending = self._pending.pop(number - 1, None)
        for earlier in [n for n in self._pending if n < number]:
            del self._pending[earlier]  # of a step without an output
        if pending is not None:
            self._learn_seconds(pending, outcomes, proposing_seconds)
            present = self.controller.acceptance.requests  # without those that have left
            for request_id, choice in pending.plan.items():
                if request_id in outcomes and request_id in present:
                    self._learn(request_id, outcomes[request_id], choice)
        if step is not None and (outcomes or not step.num_drafts):  # else the report was lost
            step = replace(step, has_seed=pending is not None and pending.has_seed)
            self.controller.observe_step(step, None if pending is None else pending.planned)

    def _learn_seconds(
        self,
        pending: _Pending,
        outcomes: Mapping[str, Outcome],
        proposing_seconds: Mapping[str, float],
    ) -> None:
        """Learn how long rounds and passes of the draft took on the device."""
        if (costs := self.controller.measured) is None:
            return
        for route, taken_s in proposing_seconds.items():
            request_ids = [
                request_id
                for request_id, choice in pending.plan.items()
                if choice.route == route and request_id in outcomes
            ]
            if not request_ids or pending.untypical.intersection(request_ids):
                continue
            num_rounds = max(pending.plan[request_id].num_rounds for request_id in request_ids)
            if route == HIERARCHICAL and LEVEL2_ALONE not in proposing_seconds:
                context = fmean(pending.contexts[request_id] for request_id in request_ids)
                drafts_s = costs.drafts_per_round * costs.draft(len(request_ids))
                round_s = taken_s / num_rounds
                if round_s < drafts_s:  # start-up measured passes of the draft too slow
                    costs.observe_level1(drafts_s, round_s)
                costs.observe_level2(len(request_ids), 3, context, max(0.0, round_s - drafts_s))
            elif route in self.controller.acceptance.with_passes:
                num_passes = num_rounds * self.controller.config.gamma
                costs.observe_level1(num_passes * costs.draft(len(request_ids)), taken_s)

    def _learn(self, request_id: str, outcome: Outcome, choice: Choice) -> None:
        report = outcome.report
        if choice.route == HIERARCHICAL and report.num_rounds:
            self.controller.acceptance.observe_rounds(
                request_id,
                self._source_of_levels,
                0,  # the device alone knows the match
                report.num_rounds,
                report.level1_accepted,
                report.level1_rejected,
            )
        if outcome.num_verified:
            self.controller.observe_full_pass(
                request_id, outcome.num_verified, outcome.num_accepted, choice
            )
        elif report.num_tokens == 0 and choice.route != HIERARCHICAL:
            # Nothing to propose is as good as a rejection.
            self.controller.observe_full_pass(request_id, 1, 0, choice)

    def release(self, request_id: str) -> None:
        """Drop everything that is kept of a request that has left."""
        self.controller.release(request_id)
        self._present.discard(request_id)
