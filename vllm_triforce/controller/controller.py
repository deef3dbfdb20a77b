"""Chooses, per step and request: speculate or not, how much, and by which levels.

The aim is the most expected tokens per second (``planner.py``), from what passes cost
(``cost_model.py``) and how often each request's tokens are accepted (``acceptance.py``). What the
user fixed is not chosen, and a request with a seed gets fixed lengths: what it samples depends on
them, and must not depend on how busy the machine is.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from vllm_triforce.config import TriForceConfig
from vllm_triforce.controller.acceptance import Acceptance, Rates, match_index
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.planner import (
    PLAIN,
    Choice,
    Option,
    Route,
    best_gamma,
    best_lookup,
    options,
    plan,
)

# Share of the time that may go into trying requests again for which speculation did not pay.
PROBE_SHARE = 0.005
# Steps after which plain decoding is looked at again where nothing can be gained: contexts grow.
_LOOK_AGAIN = 32
# Decisions between two adoptions of what was measured meanwhile; at first after each power of 2.
_ADOPT_EVERY = 16
# Lengths of a proposal that are always compared; longer ones where their full pass was measured.
_SHORT_LENGTHS = range(1, 9)


@dataclass
class Candidate:
    """A request that could be speculated on in this step."""

    request_id: str
    context: int
    """Tokens."""
    most: int
    """Longest proposal that fits."""
    match_length: int = 0
    """Tokens of the longest n-gram that prompt lookup finds again."""
    has_seed: bool = False
    is_greedy: bool = True


class Controller:
    """One engine's.

    Args:
        has_draft: whether level 1 has a draft model.
    """

    def __init__(self, config: TriForceConfig, has_draft: bool) -> None:
        self.config = config
        self.has_draft = has_draft
        self.acceptance = Acceptance()
        self.measured: CostModel | None = None
        """What this rank measured; None where nothing is chosen."""
        self.model: CostModel | None = None
        """What decisions are made by."""
        self._num_decisions = 0
        self._step = 0
        self._plain_until = 0
        self._allowance: float | None = None
        self._routes: dict[str, Choice] = {}
        """What each request did last."""

    def start(
        self, model: CostModel, adopt: Callable[[CostModel], CostModel] = lambda model: model
    ) -> None:
        """Begins to choose.

        Args:
            model: what this rank measured.
            adopt: from what this rank measured to what all ranks decide by, a copy: they have to
                decide alike, or their passes would wait for each other.
        """
        self.measured = model
        self._adopt = lambda: copy.deepcopy(adopt(self.measured))
        self.model = self._adopt()

    @property
    def chooses(self) -> frozenset[str]:
        return self.config.choices if self.model is not None else frozenset()

    # Before a proposal.

    def choose(self, candidates: list[Candidate], num_plain: int = 0) -> list[Choice]:
        """What each candidate does in this step.

        Args:
            num_plain: further requests of the batch, which decode plainly whatever is chosen.
        """
        if not self.chooses:
            chosen = [self._fixed(c) for c in candidates]
        else:
            chosen = self._choose(candidates, num_plain)
        for candidate, choice in zip(candidates, chosen):
            self._routes[candidate.request_id] = choice
        return chosen

    def _choose(self, candidates: list[Candidate], num_plain: int) -> list[Choice]:
        self._adopt_measurements()
        model, num_rows = self.model, len(candidates)
        contexts = [c.context for c in candidates]
        plain = model.full_pass([1] * num_rows, contexts) + model.overhead(num_rows + num_plain)
        open_ = [[] if c.has_seed else self._options(c, candidates, num_plain) for c in candidates]
        if "context" in self.chooses:
            chosen = plan(open_, plain, model.error)
            self._probe(chosen, candidates, open_, plain, num_plain)
        else:
            rate = num_rows / plain
            chosen = [
                max(found, key=lambda o: (1 + o.tokens) / (1 / rate + o.seconds)).choice
                if found
                else PLAIN
                for found in open_
            ]
        for i, candidate in enumerate(candidates):
            if candidate.has_seed:
                chosen[i] = self._fixed(candidate)
        return chosen

    def preview(self, candidate: Candidate) -> Choice:
        """What a new request alone would do, by the times measured so far."""
        found = self._options(candidate, [candidate], 0, Rates.of_engine())
        plain = self.model.full_pass([1], [candidate.context])
        return plan([found], plain)[0]

    def _options(
        self,
        candidate: Candidate,
        batch: list[Candidate],
        num_plain: int,
        rates: Rates | None = None,
    ) -> list[Option]:
        model, num_rows = self.model, len(batch)
        num_reqs = num_rows + num_plain
        most = min(candidate.most, self.config.num_speculative_tokens)
        lengths = [most]
        if "length" in self.chooses:
            measured = [q - 1 for q, _ in model.measured.full_by_tokens]
            lengths = sorted({*_SHORT_LENGTHS, *measured, most})
            lengths = [length for length in lengths if 0 < length <= most]
        # The linear part of the pass, as the straight line from all plain to all at full length.
        longest = num_reqs * (self.config.num_speculative_tokens + 1)
        rows = [model.full_pass([n], [0]) for n in (num_reqs, longest)]
        slope = max(0.0, rows[1] - rows[0]) / (longest - num_reqs)
        found = options(
            model,
            rates or self.acceptance.of(candidate.request_id, candidate.is_greedy),
            candidate.context,
            lengths,
            num_rows,
            self.round_seconds(num_rows),
            candidate.match_length if "gamma" in self.chooses else 0,
            slope,
            route_draft=self.has_draft and "gamma" in self.chooses,
            is_greedy=candidate.is_greedy,
        )
        if self.config.levels == "1,3":
            wanted = self._fixed(candidate).route
            found = [option for option in found if option.choice.route is wanted]
        return found

    def round_seconds(self, num_rows: int) -> float:
        """A request's share of a round of level 1 and level 2."""
        seconds = self.model.round_seconds(num_rows, self.has_draft) / num_rows
        return seconds * self.model.stretch(num_rows)

    def _probe(self, chosen, candidates, open_, plain: float, num_plain: int) -> None:
        """Tries requests again that decode plainly, within PROBE_SHARE of the time."""
        idle = [i for i, choice in enumerate(chosen) if choice is PLAIN and open_[i]]
        if self._allowance is None:
            self._allowance = plain
        self._allowance = min(self._allowance + PROBE_SHARE * plain, 4 * plain)
        hopeful = Rates.of_engine()
        next_look = self._step + _LOOK_AGAIN
        for candidate in candidates:
            if candidate.has_seed:  # no rest may put off where its speculation begins
                missing = 2 * self.config.retrieval_budget - candidate.context
                next_look = min(next_look, self._step + max(1, missing))
        for i in idle:
            most_hopeful = self._options(candidates[i], candidates, num_plain, hopeful)
            share = plain / len(candidates)
            if plan([most_hopeful], share, self.model.error)[0] is PLAIN:
                continue  # nothing to be gained whatever is accepted
            trial = _shortest_round(open_[i])
            if trial.seconds <= self._allowance:
                self._allowance -= trial.seconds
                chosen[i] = trial.choice
            else:
                missing = (trial.seconds - self._allowance) / (PROBE_SHARE * plain)
                next_look = min(next_look, self._step + 1 + int(missing))
        if all(choice is PLAIN for choice in chosen):
            self._allowance += PROBE_SHARE * plain * (next_look - self._step)
            self._plain_until = next_look

    def _fixed(self, candidate: Candidate) -> Choice:
        length = candidate.most
        if "length" in self.config.choices:
            length = min(length, _FIXED.num_speculative_tokens)
        if (
            "context" in self.config.choices
            and candidate.context < 2 * self.config.retrieval_budget
        ):
            return PLAIN
        if self.config.levels == "1,3":
            route = Route.DRAFT if self.has_draft else Route.LOOKUP
            return Choice(route, length, candidate.match_length)
        return Choice(Route.LEVELS, length)

    def level1(
        self, request_id: str, has_seed: bool, match_length: int, num_rows: int, most: int
    ) -> tuple[Route, int]:
        """Where the next tokens for level 2 come from, and how many.

        Args:
            match_length: of what prompt lookup found.
            num_rows: requests in this round.
            most: tokens that level 2 has room for.
        """
        if self.config.levels == "2,3":
            return Route.PLAIN, 0
        usual = Route.DRAFT if self.has_draft else Route.LOOKUP
        if "gamma" not in self.chooses or has_seed:
            # One that was given holds for every request.
            gamma = _FIXED.gamma if "gamma" in self.config.choices else self.config.gamma
            return usual, min(gamma, most)
        rates, is_greedy = self.acceptance.of(request_id), self.acceptance.is_greedy(request_id)
        found = (Route.PLAIN, 0, 0.0)
        if match_length:
            rate = rates.lookup[match_index(match_length)].value
            count, speed = best_lookup(self.model, rate, num_rows, most, is_greedy)
            if speed > found[2]:
                found = (Route.LOOKUP, count, speed)
        if self.has_draft:
            gamma = min(self.config.gamma, most)
            rate = rates.draft.value
            count, speed = best_gamma(self.model, rate, num_rows, gamma, is_greedy)
            if speed > found[2]:
                found = (Route.DRAFT, count, speed)
        return found[:2]

    # What came of it.

    def observe_round(
        self, request_id: str, source: Route, match_length: int, drafted: int, accepted: int
    ) -> None:
        """Level 2 tested ``drafted`` tokens of level 1."""
        for rates in self.acceptance.both(request_id):
            rates.add_round(accepted + 1)
            if source is Route.DRAFT:
                rates.draft.add(drafted, accepted)
            elif source is Route.LOOKUP and match_length:
                rates.lookup[match_index(match_length)].add(drafted, accepted)
            if source is not Route.DRAFT:
                rates.draft.fade()

    def observe_times(
        self,
        num_rows: int,
        longest: int,
        num_drafts: list[int],
        num_tests: int,
        is_greedy: bool,
        level1_seconds: float,
        level2_seconds: float,
        other_seconds: float,
    ) -> None:
        """How long a round took.

        Args:
            longest: most tokens that a request had tested.
            num_drafts: tokens of each request that asked the draft model.
            num_tests: tokens that level 2 gave logits for.
            is_greedy: whether all requests are.
        """
        measured = self.measured
        measured.observe_round(num_rows, level1_seconds + level2_seconds + other_seconds)
        measured.observe_test(num_tests, is_greedy, other_seconds)
        measured.observe("level 2", measured.level2(num_rows, longest + 1), level2_seconds)
        if any(num_drafts):
            predicted = max(num_drafts) * measured.draft(len(num_drafts))
            measured.observe("level 1", predicted, level1_seconds)

    def observe_proposal(self, request_ids: list[str], lengths: list[int], seconds: float) -> None:
        """Levels 1 and 2 made proposals of these lengths together."""
        rounds = sum(
            length / max(1.0, self.acceptance.of(request_id).round_tokens)
            for request_id, length in zip(request_ids, lengths)
        )
        num_rows = len(lengths)
        share = self.measured.round_seconds(num_rows, self.has_draft) / num_rows
        self.measured.observe_proposal(num_rows, rounds * share, seconds)

    def observe_full_pass(self, request_id: str, drafted: int, accepted: int) -> None:
        """Level 3 tested ``drafted`` tokens of the request's proposal."""
        choice = self._routes.get(request_id)
        if choice is None or not self.chooses:
            return
        for rates in self.acceptance.both(request_id):
            if choice.route is Route.LEVELS:
                rates.level2.add(drafted, accepted)
            elif choice.route is Route.DRAFT:
                rates.direct_draft.add(drafted, accepted)
            elif choice.route is Route.LOOKUP and choice.match_length:
                rates.direct[match_index(choice.match_length)].add(drafted, accepted)

    def begin_step(self) -> None:
        self._step += 1

    @property
    def is_resting(self) -> bool:
        """Whether the batch, if it stays as it is, decodes plainly in this step, unasked."""
        return self._step < self._plain_until

    def rest(self, num_steps: int) -> None:
        """Nobody can be speculated on for so many steps."""
        self._plain_until = max(self._plain_until, self._step + num_steps)

    def wake(self) -> None:
        """The batch has changed."""
        self._plain_until = 0

    @property
    def num_requests(self) -> int:
        return max(len(self._routes), len(self.acceptance.requests))

    def release(self, request_id: str) -> None:
        self.acceptance.release(request_id)
        self._routes.pop(request_id, None)

    def _adopt_measurements(self) -> None:
        count = self._num_decisions
        self._num_decisions += 1
        if count % _ADOPT_EVERY == 0 or (count < _ADOPT_EVERY and count & (count - 1) == 0):
            self.model = self._adopt()


_FIXED = TriForceConfig().fill(can_adapt=False)


def _shortest_round(found: list[Option]) -> Option:
    """A proposal by the levels that one round fills."""
    by_levels = [o for o in found if o.choice.route is Route.LEVELS] or found
    return min(by_levels, key=lambda o: abs(o.choice.num_tokens - 3))
