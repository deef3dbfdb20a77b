"""Decides per step and request: speculate or not, how far, and by which levels.

The rule is in docs/controller.md: of all proposals those that make everybody's tokens come fastest
(``planner.py``), by measured costs (``cost_model.py``) and acceptance (``acceptance.py``), and a
fixed share of the time for trials (``trials.py``). Values that the user gave are not chosen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance, Rates
from vllm_triforce.controller.backoff import PROBE_STEPS, SpeculationBackoff
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.lengths import DraftLengths, FixedLengths
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.options import Candidate, Options, SharedCosts, build_options
from vllm_triforce.controller.planner import (
    Plan,
    StepCosts,
    best_alone,
    plan,
    plan_by_routes,
    unshared_seconds,
)
from vllm_triforce.controller.routes import HIERARCHICAL, PLAIN, Choice, SourceTraits
from vllm_triforce.controller.stop_rule import StopRates, StopRule
from vllm_triforce.controller.trials import TRIAL_SHARE, Trials

# Decisions between two adoptions of learned costs; in the beginning, each power of 2.
_ADOPT_EVERY = 16
# Steps with proposals before the baseline is probed, at least.
_PROBE_AFTER = 16
# Lengths that are always compared; of longer ones those whose full pass was measured.
_SHORT_LENGTHS = range(1, 9)


@dataclass(frozen=True)
class Planned:
    """Expected cost of a step's proposals and their verification.

    Args:
        seconds: without the setup of first proposals, and without ``CostModel.per_draft`` and
            ``CostModel.speculating``, which are learned by comparison with it.
    """

    num_drafts: int
    seconds: float

    def plus(self, num_drafts: int, seconds: float) -> "Planned":
        return Planned(self.num_drafts + num_drafts, self.seconds + seconds)


class Controller:
    """Controller of one engine.

    Args:
        sources: of level 1's tokens; the first is used where nothing is chosen.
        whole_rounds: True if the number of rounds is planned; else a round follows while tokens
            are missing.
    """

    def __init__(
        self, config: ResolvedConfig, sources: Sequence[SourceTraits], whole_rounds: bool = False
    ) -> None:
        self.config = config
        # Sources that take no passes win where others gain the same.
        self.sources = sorted(sources, key=lambda source: source.takes_passes)
        self._preferred = sources[0]
        self._whole_rounds = whole_rounds
        self._drafts_per_round = 2 * any(source.takes_passes for source in sources)
        if whole_rounds:
            self._drafts_per_round = config.gamma * sources[0].takes_passes
        self.measured: CostModel | None = None
        """Costs by this rank's clock; None where nothing is chosen."""
        self._model: CostModel | None = None
        self.acceptance = Acceptance(sources)
        self._prior_rates = Rates.prior(sources)
        self._fixed = FixedLengths(config, sources[0])
        self._draft_lengths = DraftLengths(config, self.sources, self.acceptance)
        self.stop_rates = StopRates(self.acceptance)
        self.trials = Trials()
        self.backoff = SpeculationBackoff()
        self.planned: Planned | None = None
        self.is_steady = False
        """True if the newest decision is the best plan, without trials, probes and seeds."""
        self._chosen: dict[str, Choice] = {}
        """Each request's newest choice."""
        self.num_decisions = self._num_held_steps = self._last_plain_step = 0
        self._resting_s = 0.0
        """Seconds of a step of the present rest."""
        self._rest_was_ended = False

    @property
    def model(self) -> CostModel:
        """Costs that decisions are made by, the same on every rank.

        Raises:
            RuntimeError: the costs are not known yet, so ``chooses`` is empty.
        """
        if self._model is None:
            raise RuntimeError("the controller has no costs before start()")
        return self._model

    @property
    def chooses(self) -> frozenset[str]:
        """Keys that are chosen: none before the costs are known."""
        return self.config.adaptive_keys if self._model is not None else frozenset()

    def start(
        self, model: CostModel, adopt: Callable[[CostModel], CostModel] = lambda model: model
    ) -> None:
        """Begin to choose.

        Args:
            model: this rank's costs.
            adopt: returns the first rank's costs. Ranks that decided differently would wait for
                each other's passes.
        """
        self.measured = model
        self._adopt = lambda: adopt(model).copy()
        self._use_costs(self._adopt())

    def seeded_request_joined(self) -> None:
        """Decide in this step: no rest may delay a seeded request."""
        self.backoff.reset()

    def requests_joined(self) -> None:
        """Decide soon: prompts of requests without a seed have been read, or requests came back."""
        if "context" in self.chooses:
            self.backoff.on_requests_joined()
        else:
            self.backoff.reset()

    # Decisions.

    def choose(self, candidates: list[Candidate], num_plain: int = 0) -> list[Choice]:
        """Choose the proposal of each candidate in this step.

        Args:
            num_plain: further requests of the batch, which decode plainly.
        """
        self.planned, self.is_steady = None, False
        choices = [self._fixed.choice(candidate) for candidate in candidates]
        if self.chooses:
            if self.num_decisions % _ADOPT_EVERY == 0 or (
                self.num_decisions < _ADOPT_EVERY and self.num_decisions.bit_count() == 1
            ):
                self._use_costs(self._adopt())
            self.num_decisions += 1
            options = self._options(candidates, num_plain)
            costs = self.step_costs(candidates, num_plain)
            columns = self._choose_columns(candidates, options, costs)
            for row, (candidate, column) in enumerate(zip(candidates, columns)):
                # A seeded request's samples depend on its lengths, which must not depend on costs.
                if not candidate.has_seed:
                    choices[row] = options.choice(row, column)
            if (columns >= 0).sum() == sum(choice is not PLAIN for choice in choices):
                self.planned = _planned(candidates, options, columns, costs)
        self._chosen.update((c.request_id, choice) for c, choice in zip(candidates, choices))
        self._num_held_steps = 0
        return choices

    def hold(self) -> None:
        """Count a step that repeats the newest decision."""
        self._num_held_steps += 1

    def _choose_columns(
        self, candidates: list[Candidate], options: Options, costs: StepCosts
    ) -> np.ndarray:
        """Return the column of each request's option, -1 for plain decoding; [num_reqs]."""
        if "context" not in self.chooses:
            return best_alone(options, costs.plain_s / len(candidates))
        was_ended, self._rest_was_ended = self._rest_was_ended, False
        self.trials.begin_decision(candidates)
        best = plan_by_routes(options, costs)
        has_seed = any(candidate.has_seed for candidate in candidates)
        if not has_seed and self._probe_is_due(best, costs.plain_s):
            self.backoff.begin_probe()
            return np.full(len(candidates), -1)
        budget, columns = self.trials.budget, best.options
        budget.earn((1 + self._num_held_steps) * best.seconds, costs.plain_s)
        num_reqs = len(candidates) + costs.num_plain
        reevaluation_s = costs.model.reevaluation_seconds(num_reqs, _are_greedy(candidates))
        has_trials = self.trials.add(
            columns,
            candidates,
            options,
            lambda: self._options(candidates, costs.num_plain, self._prior_rates),
            costs,
            reevaluation_s,
        )
        if (columns >= 0).any():
            self.backoff.restart()
        else:
            if self.measured is not None and not was_ended:
                self.measured.forget_a_little()
            num_steps = self.backoff.next_rest(reevaluation_s, costs.plain_s)
            for candidate in candidates:
                if candidate.has_seed:  # no rest may delay its speculation
                    num_steps = min(num_steps, max(1, self._fixed.tokens_until(candidate)))
            self._resting_s = costs.plain_s
            budget.earn(num_steps * costs.plain_s, costs.plain_s)
            self.backoff.begin(num_steps)
        self.is_steady = not (has_trials or has_seed)
        return columns

    def _probe_is_due(self, best: Plan, plain_s: float) -> bool:
        """True if the baseline, which speculation is compared with, was not timed for long.

        A probe takes at most the share of the time that trials have.
        """
        step = self.backoff.step
        if best.is_plain:
            self._last_plain_step = step
            return False
        num_steps = step - self._last_plain_step
        lost_s = PROBE_STEPS * plain_s * (1 - 1 / best.speedup)
        if num_steps < _PROBE_AFTER or lost_s > TRIAL_SHARE * num_steps * best.seconds:
            return False
        self._last_plain_step = step
        return True

    def step_costs(
        self,
        candidates: Sequence[Candidate],
        num_plain: int,
        plain_contexts: Sequence[int] = (),
    ) -> StepCosts:
        """Return the costs of a step beside its proposals.

        Args:
            plain_contexts: contexts of the ``num_plain`` requests; the full pass is priced without
                those not given.
        """
        model, count, is_greedy = self.model, len(candidates), _are_greedy(candidates)
        contexts = [*(c.context for c in candidates), *plain_contexts]
        pass_s = model.full_pass([1] * len(contexts), contexts)
        plain_s = max(pass_s / 2, pass_s + model.overhead(count + num_plain, is_greedy))
        speculating_s = model.speculating_seconds(count + num_plain, is_greedy)
        return StepCosts(model, plain_s, speculating_s, num_plain, self._drafts_per_round)

    def _options(
        self, candidates: Sequence[Candidate], num_plain: int, rates: Rates | None = None
    ) -> Options:
        """Build the options of a batch.

        Args:
            rates: of every request, in place of the learned ones.
        """
        model, max_tokens, count = self.model, self.config.num_speculative_tokens, len(candidates)
        fixed_lengths: list[int] = []
        if "length" in self.chooses:
            measured = [int(tokens) - 1 for tokens, _ in model.measured.full_by_tokens]
            fixed_lengths = sorted({*_SHORT_LENGTHS, *measured} & {*range(1, max_tokens + 1)})
        longest = np.array([0 if c.has_seed else min(c.most, max_tokens) for c in candidates])
        lengths = np.empty((count, len(fixed_lengths) + 1), dtype=np.int64)
        lengths[:, :-1], lengths[:, -1] = fixed_lengths, longest
        lengths[lengths > longest[:, None]] = 0
        # Between all plain and all at full length the full pass is taken for a line.
        num_reqs = count + num_plain
        more_s = model.rows(num_reqs * (max_tokens + 1)) - model.rows(num_reqs)
        costs = SharedCosts(
            max(0.0, more_s) / (num_reqs * max_tokens),
            model.attention_scales(num_reqs, count)[1],
            model.round_seconds(count, self._drafts_per_round) / count,
            model.draft(count) / count,
            self.config.gamma if self._whole_rounds else 0,
        )
        routes: dict[str, SourceTraits | None] = {HIERARCHICAL: None}
        if self.config.levels == "1,3":
            routes = {self._preferred.name: self._preferred}
        elif "gamma" in self.chooses:
            routes |= {source.name: source for source in self.sources}
        acceptance = [rates or self.acceptance.of(c.request_id, c.is_greedy) for c in candidates]
        ended = {
            source.name: [self.stop_rates.expected_draft(source.name, c) for c in candidates]
            for source in self.sources
            if source.takes_passes and rates is None and "length" in self.chooses
        }
        return build_options(model, candidates, acceptance, lengths, costs, routes, ended)

    def extend_to_shared_rounds(
        self, candidates: Sequence[Candidate], choices: list[Choice], num_rounds: int
    ) -> list[Choice]:
        """Lengthen proposals by levels 1 and 2 that take part in ``num_rounds``.

        A proposal that ends at the mean loses the tokens that lucky rounds add. The rounds are made
        all the same, and a place without a token only takes its place in the full pass.
        """
        if self.planned is None or not num_rounds:
            return choices
        extended = []
        for candidate, choice in zip(candidates, choices):
            if choice.route == HIERARCHICAL and not candidate.has_seed:
                longest = min(candidate.most, self.config.num_speculative_tokens)
                num_tokens = min(longest, choice.num_tokens + (num_rounds + 1) // 2)
                choice = replace(choice, num_tokens=num_tokens)
            extended.append(choice)
        contexts = [candidate.context for candidate in candidates]
        before, after = ([1 + c.num_tokens for c in some] for some in (choices, extended))
        seconds = self.model.full_pass(after, contexts) - self.model.full_pass(before, contexts)
        self.planned = self.planned.plus(sum(after) - sum(before), seconds)
        return extended

    def choose_draft(
        self,
        request_id: str,
        has_seed: bool,
        match_classes: Mapping[str, int],
        num_rows: int,
        most: int,
    ) -> tuple[str | None, int]:
        """Choose the source of a round's draft and its number of tokens.

        Args:
            match_classes: match class by source that has tokens.
            num_rows: requests in this round.
            most: tokens that level 2 has room for.
        """
        if self.config.levels == "2,3":
            return None, 0
        if "gamma" not in self.chooses or has_seed:
            return self._fixed.draft(most)
        return self._draft_lengths.best(request_id, match_classes, num_rows, most)

    def would_propose(self, candidate: Candidate, other_contexts: Sequence[int]) -> bool:
        """True if a proposal for this request pays while the rest of its batch decodes plainly.

        Args:
            other_contexts: tokens of context of the batch's other requests.
        """
        options = self._options([candidate], len(other_contexts))
        costs = self.step_costs([candidate], len(other_contexts), other_contexts)
        return not plan_by_routes(options, costs).is_plain

    def end_rest(self) -> None:
        """Decide in this step, and not at the rest's end."""
        num_left = self.backoff.end()
        # The whole rest was credited in advance.
        self.trials.budget.earn(-num_left * self._resting_s, self._resting_s)
        self._rest_was_ended = True

    def preview(self, candidate: Candidate) -> Choice:
        """Return the choice for a new request alone, with prior acceptance."""
        options = self._options([candidate], 0, self._prior_rates)
        best = plan(options, self.model.full_pass([1], [candidate.context]))
        return options.choice(0, best.options[0])

    def _use_costs(self, model: CostModel) -> None:
        self._model = model
        self._draft_lengths.use_costs(model)

    # Ends of drafts.

    def rule_for_direct_draft(
        self, source: str, candidates: Sequence[Candidate], num_plain: int
    ) -> StopRule | None:
        """Return the rule for drafts that go straight to the full pass; None for fixed lengths.

        Args:
            candidates: that draft.
            num_plain: other requests of the batch.
        """
        if "length" not in self.chooses:
            return None
        costs, num_reqs = self.step_costs(candidates, num_plain), len(candidates) + num_plain
        verify_s = self.model.verification(
            [c.context for c in candidates],
            [c.is_greedy for c in candidates],
            num_reqs,
            self.config.num_speculative_tokens,
        )
        return StopRule(
            source,
            costs.plain_s + costs.speculating_s,
            self.model.draft(len(candidates)),
            verify_s.tolist(),
            num_reqs,
            *self.stop_rates.of(
                source,
                False,
                [c.request_id for c in candidates],
                [c.has_seed for c in candidates],
            ),
        )

    def rule_for_round(
        self, source: str, request_ids: Sequence[str], has_seed: Sequence[bool]
    ) -> StopRule | None:
        """Return the rule for a round's drafts for level 2; None for fixed lengths."""
        if not {"length", "gamma"} <= self.chooses:
            return None
        num_rows, is_greedy = len(request_ids), all(map(self.acceptance.is_greedy, request_ids))
        seconds = self.model.rounds_without_drafting(num_rows, self.config.gamma, is_greedy)
        # In ``seconds`` all rows have the same number of tokens.
        verify_s = [[(s - seconds[0]) / num_rows for s in seconds]] * num_rows
        rates, means = self.stop_rates.of(source, True, request_ids, has_seed)
        pass_s = self.model.draft(num_rows)
        return StopRule(source, seconds[0], pass_s, verify_s, num_rows, rates, means)

    def on_draft_end(
        self,
        candidates: Sequence[Candidate],
        num_planned: Sequence[int],
        rule: StopRule,
        num_passes: int,
    ) -> None:
        """Learn from direct drafts that have ended, and correct the present plan.

        Args:
            num_planned: tokens of each request by ``choose()``.
        """
        expected = [self.stop_rates.expected_draft(rule.source, c) for c in candidates]
        planned_passes = max(n if e is None else e.passes for n, e in zip(num_planned, expected))
        tokens, seconds = 0, (num_passes - planned_passes) * rule.pass_s
        for row, (candidate, planned) in enumerate(zip(candidates, num_planned)):
            if rule.rates[row] is None:
                continue
            classes, request_id = rule.classes[row], candidate.request_id
            self.stop_rates.on_draft_end(rule.source, request_id, classes, num_passes)
            more = len(classes) - planned
            tokens += more
            seconds += rule.verify_s[row][len(classes)] - rule.verify_s[row][planned]
            seconds -= more * self.model.draft_seconds(candidate.is_greedy)
        self.add_to_plan(tokens, seconds)

    # Outcomes.

    def observe_round(
        self,
        request_id: str,
        source: str | None,
        match_class: int | None,
        num_drafted: int,
        num_accepted: int,
        classes: Sequence[int] = (),
    ) -> None:
        """Learn from level 2's test of a round's draft; ``source`` is None for no draft.

        Args:
            classes: confidence classes of the tokens, if a rule could end the draft.
        """
        num_unbiased = num_drafted
        if classes and source is not None:
            self.stop_rates.observe_round(request_id, source, classes[:num_drafted], num_accepted)
            num_unbiased = 1
        self.acceptance.observe_round(
            request_id, source, match_class, num_drafted, num_accepted, num_unbiased
        )

    def await_outcomes(self, request_ids: Iterable[str]) -> None:
        """Expect outcomes of these proposals after further decisions."""
        self.trials.await_outcomes(request_ids)

    def outcome_lost(self, request_id: str) -> None:
        """Expect no outcome of a proposal any more."""
        self.trials.discard(request_id)

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
        self.trials.on_verified(request_id, drafted, accepted)
        num_unbiased = self.stop_rates.observe_direct(
            request_id, choice.route, drafted, accepted, probs
        )
        drafted, accepted = min(num_unbiased, drafted), min(num_unbiased, accepted)
        self.acceptance.observe_full_pass(request_id, choice, drafted, accepted, probs)

    def observe_step(self, step: StepTime, planned: Planned | None) -> None:
        """Learn from the seconds of a step.

        Args:
            planned: ``take_plan()`` for its drafts. A step with other drafts says nothing.
        """
        if self.measured is None:
            return
        if step.num_drafts:
            if planned is None or planned.num_drafts != step.num_drafts:
                return
            step.planned_seconds = planned.seconds
        self.measured.observe_step(step)

    def take_plan(self) -> Planned | None:
        """Return the expected cost of the proposals that are verified next, once."""
        planned, self.planned = self.planned, None
        return planned

    def add_to_plan(self, num_drafts: int, seconds: float) -> None:
        """Add drafts and their cost to the present plan; either may be negative."""
        if self.planned is not None:
            self.planned = self.planned.plus(num_drafts, seconds)

    def reads_window(self, num_tokens: int) -> None:
        """Add the draft model's reading of ``num_tokens`` to the present plan."""
        if self.planned is not None:
            self.add_to_plan(0, self.model.reading_window(num_tokens))

    def forget_plan(self) -> None:
        """Compare the present proposals with no plan: they take longer for once."""
        self.planned = None

    @property
    def num_requests(self) -> int:
        """Number of requests with any state."""
        return max(len(self._chosen), len(self.acceptance.requests), self.trials.num_requests)

    def release(self, request_id: str) -> None:
        self.acceptance.release(request_id)
        self.trials.release(request_id)
        self._chosen.pop(request_id, None)
        self.stop_rates.release(request_id)


def _are_greedy(candidates: Sequence[Candidate]) -> bool:
    return all(candidate.is_greedy for candidate in candidates)


def _planned(
    candidates: Sequence[Candidate], options: Options, columns: np.ndarray, costs: StepCosts
) -> Planned:
    rows = np.flatnonzero(columns >= 0)
    taken = rows, columns[rows]
    lengths = options.lengths[taken]
    seconds = float((options.seconds - options.amortized_setup_s)[taken].sum())
    seconds += unshared_seconds(options, columns, costs)
    for row, length in zip(rows, lengths):
        seconds -= int(length) * costs.model.draft_seconds(candidates[row].is_greedy)
    return Planned(int(lengths.sum()), seconds)
