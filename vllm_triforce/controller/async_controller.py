"""Decisions that are made before it is known what came of the last ones.

On Model Runner V2 the scheduler says what a step's requests propose behind it, and hears of the
outcome some steps later. The controller is the same; here is kept what was decided and is not known
yet. What a proposal takes is seen from outside: outputs come once a full pass is done, so from one
output to the next passes the time of the proposals behind the first and of the pass that verifies
them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_triforce.controller.acceptance import ROUND_PRIOR
from vllm_triforce.controller.controller import Controller
from vllm_triforce.controller.learning import Planned
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.options import Candidate
from vllm_triforce.controller.round_lengths import extend_to_shared_rounds
from vllm_triforce.controller.routes import LEVELS, PLAIN, Choice

# Of the time between two decisions, what the first one may have taken; and seconds that one holds
# at most.
_DECIDING, _LONGEST = 0.05, 0.25


@dataclass(frozen=True)
class Outcome:
    """What came of a request's proposal."""

    num_proposed: int
    """Tokens; it may be shorter than was planned."""
    num_verified: int
    """Of them, those that a full pass verified."""
    num_accepted: int
    """Of these, those that it accepted."""
    num_rounds: int = 0
    """Of levels 1 and 2 in which it took part."""
    level1_accepted: int = 0
    level1_rejected: int = 0
    """Rounds in which level 2 rejected a token of level 1."""


@dataclass
class _Decided:
    """A step whose outcome is not known yet."""

    choices: dict[str, tuple[Choice, float]]
    """By request, and how many tokens it is expected to gain."""
    planned: Planned | None


@dataclass
class _Kept:
    """A decision that holds for further steps."""

    plan: dict[str, tuple[Choice, int]]
    names: set[str]
    """Of all requests that were decided on."""
    made: _Decided
    until: float
    """On the clock."""


@dataclass
class StepSeen:
    """A step that has ended.

    Args:
        number: ``decide()``'s.
        tokens: of each request, verified in its full pass.
        contexts: of each request.
        is_greedy: whether all are.
        seconds: since the output of the step before.
        outcomes: by request, of the proposals that were verified in it.
        is_comparable: whether the step before had the same requests, and nobody reads a prompt.
    """

    number: int
    tokens: list[int]
    contexts: list[int]
    is_greedy: bool
    seconds: float
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    is_comparable: bool = True


class AsyncController:
    """A controller that is told of a step's outcome when others have been decided.

    Deciding takes longer the more requests there are, and the scheduler waits for it. What was
    decided holds for as many steps as keep that at a twentieth of the time, unless something is
    tried out by it or a request has a seed; requests that join meanwhile decode plainly until then.
    """

    def __init__(
        self,
        controller: Controller,
        source_of_levels: str | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.controller = controller
        self._clock = clock
        self._kept: _Kept | None = None
        self._source_of_levels = source_of_levels
        self._decided: dict[int, _Decided] = {}
        self._num_steps = 0
        self._present: set[str] = set()
        self._alive: set[str] = set()
        """Requests that have proposed something and not left."""

    def decide(
        self, names: Sequence[str], candidate: Callable[[str], Candidate], num_plain: int = 0
    ) -> tuple[int, dict[str, tuple[Choice, int]]]:
        """What requests propose behind the step that is being made.

        Args:
            names: of the requests that could be speculated on.
            candidate: describes one of them; most steps need none.
            num_plain: further requests of the step.

        Returns:
            The step's number; of each request that proposes something the choice, and in how many
            rounds level 1 drafts for it.
        """
        controller, number = self.controller, self._num_steps
        self._num_steps += 1
        controller.backoff.begin_step()
        joined = [candidate(name) for name in names if name not in self._present]
        self._present = set(names)
        if joined:
            self._note_joined(joined)
        if not names or (controller.chooses and controller.backoff.is_resting):
            return number, {}
        if self._kept is not None and self._clock() < self._kept.until:
            controller.hold()
            return number, self._decide_as_before(number, self._kept, candidate)
        began = self._clock()
        candidates = [candidate(name) for name in names]
        if controller.config.choices and not controller.chooses:
            # What passes take is not known yet, and no request with a seed waits for that.
            candidates = [its for its in candidates if its.has_seed]
            num_plain += len(names) - len(candidates)
        chosen = controller.choose(candidates, num_plain)
        rounds = [self._rounds(c, choice) for c, choice in zip(candidates, chosen)]
        by_levels = [n for n, choice in zip(rounds, chosen) if choice.route == LEVELS]
        if by_levels:
            chosen = extend_to_shared_rounds(controller, candidates, chosen, rounds)
        plan = {
            # Who is short of its tokens goes on as long as there are rounds for another.
            c.request_id: (choice, n if c.has_seed or choice.route != LEVELS else max(by_levels))
            for c, choice, n in zip(candidates, chosen, rounds)
            if choice is not PLAIN
        }
        self._kept = None
        if plan:
            made = {name: controller.chosen_for(name) for name in plan}
            decided = _Decided(made, controller.take_plan())
            self._note_decided(number, decided)
            if controller.is_steady:
                now = self._clock()
                until = now + min(_LONGEST, (now - began) / _DECIDING)
                self._kept = _Kept(plan, set(names), decided, until)
        return number, plan

    def _note_decided(self, number: int, decided: _Decided) -> None:
        self._decided[number] = decided
        self.controller.await_outcomes(decided.choices)
        self._alive.update(decided.choices)

    def _decide_as_before(
        self, number: int, kept: _Kept, candidate: Callable[[str], Candidate]
    ) -> dict[str, tuple[Choice, int]]:
        """The same for those that are still there, as far as they have room for it."""
        plan, choices, is_same = {}, {}, self._present == kept.names
        for name, (choice, rounds) in kept.plan.items():
            if name not in self._present:
                continue
            most = candidate(name).most
            if choice.num_tokens > most:
                choice, is_same = replace(choice, num_tokens=most), False
            # What was gained over what was expected is learnt of a decision's first step alone:
            # expectations are corrected by it, and these were before it.
            plan[name], choices[name] = (choice, rounds), (choice, 0.0)
        if plan:
            planned = kept.made.planned if is_same else None
            self._note_decided(number, _Decided(choices, replace(planned) if planned else None))
        return plan

    def _note_joined(self, joined: Sequence[Candidate]) -> None:
        if any(candidate.has_seed for candidate in joined):
            self._kept = None
            self.controller.seeded_request_joined()
        if not all(candidate.has_seed for candidate in joined):
            self.controller.requests_joined()

    def _rounds(self, candidate: Candidate, choice: Choice) -> int:
        """As many as it takes on average; of a request with a seed, as many as it is hoped to take,
        so that what it samples does not depend on what is known of it."""
        if choice.route != LEVELS:
            return -(-choice.num_tokens // self.controller.config.gamma)
        per_round = ROUND_PRIOR
        if not candidate.has_seed:
            rates = self.controller.acceptance.of(candidate.request_id, candidate.is_greedy)
            per_round = max(1.0, rates.round_tokens)
        return max(1, round(choice.num_tokens / per_round))

    def ended(self, step: StepSeen) -> None:
        """A step's output has come; it verified what was proposed behind the step before."""
        decided = self._decided.pop(step.number - 1, None)
        for number in [n for n in self._decided if n < step.number]:
            for name in self._decided.pop(number).choices:  # of a step without an output
                self.controller.outcome_lost(name)
        for name, outcome in step.outcomes.items():
            if decided is not None and name in decided.choices and name in self._alive:
                self._learn(name, outcome, decided.choices[name])
        if decided is not None:
            for name in decided.choices.keys() - step.outcomes.keys():
                self.controller.outcome_lost(name)
        if self.controller.measured is None or not step.is_comparable or not step.tokens:
            return
        num_drafts = sum(step.tokens) - len(step.tokens)
        self.controller.observe_step(
            StepTime(step.is_greedy, step.tokens, step.contexts, step.seconds, num_drafts),
            None if decided is None else decided.planned,
        )

    def _learn(self, name: str, outcome: Outcome, made: tuple[Choice, float]) -> None:
        choice, _ = made
        if choice.route == LEVELS and outcome.num_rounds:
            self.controller.observe_rounds(
                name,
                self._source_of_levels,
                outcome.num_rounds,
                outcome.level1_accepted,
                outcome.level1_rejected,
            )
        if outcome.num_verified:
            self.controller.observe_full_pass(
                name, outcome.num_verified, outcome.num_accepted, made
            )
        elif outcome.num_proposed == 0 and choice.route != LEVELS:
            # It had nothing to propose, which is as good as a rejection.
            self.controller.observe_full_pass(name, 1, 0, made)
        else:
            self.controller.outcome_lost(name)

    def release(self, request_id: str) -> None:
        """A request has left."""
        self.controller.release(request_id)
        self._present.discard(request_id)
        self._alive.discard(request_id)
