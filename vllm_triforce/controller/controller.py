"""Decides per step and request: speculate or not, how far, and by which levels.

The rule is in docs/controller.md: of all proposals those that make everybody's tokens come fastest
(``planner.py``), by measured costs (``cost_model.py``) and acceptance (``acceptance.py``), and
proposals that explore (``exploration.py``). Values that the user gave are not chosen.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance, Rates
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.draft_lengths import DraftLengths, StopRule, StopRules
from vllm_triforce.controller.exploration import Exploration
from vllm_triforce.controller.lengths import FixedLengths
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.planner import (
    Options,
    StepCosts,
    best_alone,
    build_options,
    plan,
    unshared_seconds,
)
from vllm_triforce.controller.routes import (
    HIERARCHICAL,
    PLAIN,
    Candidate,
    Choice,
    MatchClass,
    SourceTraits,
)

# Decisions between two adoptions of the first rank's costs; in the beginning, each power of 2.
_ADOPT_EVERY = 16
# Lengths that are always compared; of longer ones those whose full pass was measured.
_SHORT_LENGTHS = range(1, 9)


class Planned(NamedTuple):
    """Expected cost of a step's proposals and their verification."""

    num_drafts: int
    seconds: float
    """Without ``CostModel.speculating``, which is learned by comparison with it."""


class Controller:
    """Controller of one engine.

    Args:
        sources: of level 1's tokens; the first is used where nothing is chosen.
        whole_rounds: True if the number of rounds is planned; else a round follows while tokens
            are missing.
        count_step: adds seconds to the counters of the break-even (``StepTime.break_even()``).
    """

    def __init__(
        self,
        config: ResolvedConfig,
        sources: Sequence[SourceTraits],
        whole_rounds: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        count_step: Callable[[float, float], None] = lambda *_: None,
    ) -> None:
        self.config = config
        # Sources that take no passes win where others gain the same.
        self.sources = sorted(sources, key=lambda source: source.takes_passes)
        self._preferred = sources[0]
        self._whole_rounds = whole_rounds
        self._drafts_per_round = 2 * any(source.takes_passes for source in sources)
        if whole_rounds:
            self._drafts_per_round = config.gamma * sources[0].takes_passes
        self.chooses: tuple[str, ...] = ()
        """Keys that are chosen: none before the costs are known."""
        self.chooses_source = False
        """True if sources of drafts are chosen: not before the costs are known."""
        self.measured: CostModel | None = None
        """Costs by this rank's clock; None where nothing is chosen."""
        self.model: CostModel
        """Costs that decisions are made by, from ``start()`` on; the same on every rank."""
        self.acceptance = Acceptance(sources)
        self._prior_rates = Rates.prior(sources)
        self._fixed = FixedLengths(config, sources[0])
        self._draft_lengths = DraftLengths(config, self.sources, self.acceptance)
        self.stop_rules = StopRules(config, self.acceptance)
        self.exploration = Exploration(config.max_slowdown, self._fixed)
        self.backoff, self.trials = self.exploration.backoff, self.exploration.trials
        self.planned: Planned | None = None
        self.is_steady = False
        """True if the newest decision is the best plan, without trials, probes and seeds."""
        self._chosen: dict[str, Choice] = {}
        """Each request's newest choice."""
        self.num_decisions = self._num_held_steps = 0
        self.clock = clock
        self._count_step = count_step

    def start(
        self, model: CostModel, adopt: Callable[[CostModel], CostModel] | None = None
    ) -> None:
        """Begin to choose.

        Args:
            model: this rank's costs.
            adopt: returns the first rank's costs, where there are several ranks. Ranks that decided
                differently would wait for each other's passes. One rank alone decides by its newest
                costs: where the machine slows down in the middle of an answer, plain steps must not
                seem slow earlier than passes.
        """
        self.chooses, self.chooses_source = self.config.adaptive_keys, self.config.chooses_source
        self._routes: dict[str, SourceTraits | None] = {}
        if self.config.uses_level2:
            self._routes[HIERARCHICAL] = None
        if self.chooses_source:
            self._routes |= {source.name: source for source in self.sources}
        elif not self._routes:
            self._routes[self._preferred.name] = self._preferred
        self.measured = replace(model, drafts_per_round=self._drafts_per_round)
        self._adopt = adopt
        self._update_costs(self.measured)

    def seeded_request_joined(self) -> None:
        """Decide in this step: no rest may delay a seeded request."""
        self.backoff.at_most(0)

    def requests_joined(self) -> None:
        """Decide soon: unseeded requests have read their prompts, or have come back.

        As soon as a decision is paid for, and not in the step that reads a prompt.
        """
        num_steps = max(1, self.backoff.paid_from - self.backoff.step)
        self.backoff.at_most(num_steps if "context" in self.chooses else 0)

    # Decisions.

    def choose(self, candidates: list[Candidate], num_plain: int = 0) -> list[Choice]:
        """Choose the proposals of a step; ``num_plain`` further requests decode plainly."""
        self.planned, self.is_steady = None, False
        if (measured := self.measured) is None or not self.chooses:
            choices = [self._fixed.choice(candidate) for candidate in candidates]
        else:
            start = self.clock()
            count = self.num_decisions
            is_due = count % _ADOPT_EVERY == 0 or (count < _ADOPT_EVERY and count.bit_count() == 1)
            if self._adopt is None or is_due:
                self._update_costs(measured)
            self.num_decisions += 1
            options = self._options(candidates, num_plain)
            costs = self.step_costs(candidates, num_plain)
            if "context" in self.chooses:
                columns, self.is_steady = self.exploration.choose(
                    candidates,
                    options,
                    lambda: self._options(candidates, num_plain, self._prior_rates),
                    costs,
                    measured,
                    1 + self._num_held_steps,
                )
            else:
                columns = best_alone(options, costs.plain_s / len(candidates))
            choices = [
                # A seeded request's samples depend on its lengths, which must not depend on costs.
                self._fixed.choice(candidate) if candidate.has_seed else options.choice(row, column)
                for row, (candidate, column) in enumerate(zip(candidates, columns))
            ]
            if (columns >= 0).sum() == sum(choice is not PLAIN for choice in choices):
                self.planned = _planned(options, columns, costs)
            measured.observe_decision(self.clock() - start)
        self._chosen.update((c.request_id, choice) for c, choice in zip(candidates, choices))
        self._num_held_steps = 0
        return choices

    def _update_costs(self, measured: CostModel) -> None:
        self.model = self._adopt(measured).copy() if self._adopt else measured
        if not self._whole_rounds:
            self._draft_lengths.use_costs(self.model)

    def hold(self) -> None:
        """Count a step that repeats the newest decision."""
        self._num_held_steps += 1

    def step_costs(self, candidates: Sequence[Candidate], num_plain: int) -> StepCosts:
        """Return the costs of a step beside its proposals.

        The full pass is priced without the contexts of the ``num_plain`` other requests.
        """
        model, is_greedy = self.model, all(c.is_greedy for c in candidates)
        contexts, num_reqs = [c.context for c in candidates], len(candidates) + num_plain
        return StepCosts(
            model,
            model.plain_step(contexts, num_reqs, is_greedy),
            model.speculating_seconds(num_reqs, is_greedy),
            num_plain,
            float(np.mean(contexts)),
            np.array([not c.has_seed for c in candidates]),
        )

    def _options(
        self, candidates: Sequence[Candidate], num_plain: int, rates: Rates | None = None
    ) -> Options:
        """Build the options of a batch, by the learned rates or by ``rates`` of every request."""
        model, max_tokens = self.model, self.config.num_speculative_tokens
        fixed_lengths: list[int] = []
        if "length" in self.chooses:
            measured = [int(tokens) - 1 for tokens, _ in model.measured.full_by_tokens]
            fixed_lengths = sorted({*_SHORT_LENGTHS, *measured} & {*range(1, max_tokens + 1)})
        longest = np.array([0 if c.has_seed else min(c.max_tokens, max_tokens) for c in candidates])
        lengths = np.empty((len(candidates), len(fixed_lengths) + 1), dtype=np.int64)
        lengths[:, :-1], lengths[:, -1] = fixed_lengths, longest
        lengths[lengths > longest[:, None]] = 0
        acceptance = [rates or self.acceptance.of(c.request_id, c.is_greedy) for c in candidates]
        drafts_per_round = self.config.gamma if self._whole_rounds else 0
        return build_options(
            model, candidates, acceptance, lengths, self._routes, num_plain, drafts_per_round
        )

    def choose_draft(
        self,
        request_id: str,
        has_seed: bool,
        match_classes: Mapping[str, MatchClass | None],
        num_rows: int,
        max_tokens: int,
    ) -> tuple[str | None, int]:
        """Choose the source of a round's draft and its number of tokens; see ``DraftLengths``."""
        if self.config.levels == "2,3":
            return None, 0
        if "gamma" not in self.chooses or has_seed:
            return self._fixed.draft(max_tokens)
        return self._draft_lengths.best(request_id, match_classes, num_rows, max_tokens)

    def preview(self, candidate: Candidate) -> Choice:
        """Return the choice for a new request alone, with prior acceptance."""
        options = self._options([candidate], 0, self._prior_rates)
        best = plan(options, self.step_costs([candidate], 0))
        return options.choice(0, best.options[0])

    # Ends of drafts.

    def rule_for_direct_draft(
        self, source: str, candidates: Sequence[Candidate], num_plain: int
    ) -> StopRule | None:
        """Return the rule for drafts of ``candidates`` that go straight to the full pass.

        None for fixed lengths.
        """
        if "length" not in self.chooses:
            return None
        costs = self.step_costs(candidates, num_plain)
        return self.stop_rules.for_direct_draft(source, candidates, costs)

    def on_draft_end(
        self,
        candidates: Sequence[Candidate],
        num_planned: Sequence[int],
        rule: StopRule,
        num_passes: int,
    ) -> None:
        """Learn from direct drafts that have ended, and correct the present plan."""
        self.add_to_plan(*self.stop_rules.on_draft_end(candidates, num_planned, rule, num_passes))
        for candidate, classes in zip(candidates, rule.classes):
            if not (classes or candidate.has_seed):
                # Nothing to propose is as good as a rejection.
                choice = self._chosen.get(candidate.request_id, PLAIN)
                self.acceptance.observe_full_pass(candidate.request_id, choice, 1, 0)

    # Outcomes.

    def observe_full_pass(
        self,
        request_id: str,
        drafted: int,
        accepted: int,
        choice: Choice | None = None,
        probs: Sequence[float] | None = None,
    ) -> None:
        """Learn from the full pass's test of a request's proposal.

        Args:
            choice: that made it; by default the newest.
            probs: probability of acceptance of each token, if known.
        """
        choice = choice or self._chosen.get(request_id, PLAIN)
        if choice is PLAIN or not self.chooses:
            return
        self.trials.on_verified(request_id, choice.route, accepted)
        if choice.route != HIERARCHICAL:
            num = self.stop_rules.observe_direct(request_id, choice.route, drafted, accepted)
            drafted, accepted = min(num, drafted), min(num, accepted)
        self.acceptance.observe_full_pass(request_id, choice, drafted, accepted, probs)

    def observe_step(self, step: StepTime, planned: Planned | None) -> None:
        """Learn from the seconds of a step, whose drafts were ``planned``."""
        if self.measured is None:
            return
        if step.num_drafts:
            if planned is None or planned.num_drafts != step.num_drafts:
                return  # a step with other drafts says nothing
            if self._whole_rounds:
                # Where probabilities are known, estimates are right sooner than a wait ends.
                self.exploration.observe_loss(self.measured, step)
            step.planned_seconds = planned.seconds
        seconds, plain_s = self.measured.observe_step(step)
        if step.num_drafts and self.measured.overheads:
            self._count_step(*step.break_even(seconds, plain_s))

    def take_plan(self) -> Planned | None:
        """Return the expected cost of the proposals that are verified next, once."""
        planned, self.planned = self.planned, None
        return planned

    def add_to_plan(self, num_drafts: int, seconds: float) -> None:
        """Add drafts and their cost to the present plan; either may be negative."""
        if self.planned is not None:
            before = self.planned
            self.planned = Planned(before.num_drafts + num_drafts, before.seconds + seconds)

    def forget_plan(self) -> None:
        """Compare the present proposals with no plan: they take longer for once."""
        self.planned = None

    @property
    def num_requests(self) -> int:
        """Number of requests with any state."""
        waiting = len(self.trials.waiting_since)
        return max(len(self._chosen), len(self.acceptance.requests), waiting)

    def release(self, request_id: str) -> None:
        self.acceptance.release(request_id)
        self.trials.release(request_id)
        self._chosen.pop(request_id, None)
        self.stop_rules.release(request_id)


def _planned(options: Options, columns: np.ndarray, costs: StepCosts) -> Planned:
    rows = np.flatnonzero(columns >= 0)
    taken = rows, columns[rows]
    seconds = options.seconds[taken].sum() + unshared_seconds(options, columns, costs)
    return Planned(int(options.lengths[taken].sum()), float(seconds))
