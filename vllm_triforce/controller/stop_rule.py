"""Where a draft ends: the draft's own distributions say how likely its tokens are accepted."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_triforce.controller.acceptance import Rate
from vllm_triforce.controller.options import Candidate, EndedDrafts

# Upper bounds of a class: the largest probability of the distribution that a token is drawn from.
_BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
# Acceptance by class of SmolLM2's head, at T=0 and 1 (docs/results.md).
_GREEDY_PRIOR = (0.15, 0.34, 0.50, 0.70, 0.83, 0.92, 0.99, 1.00)
_SAMPLED_PRIOR = (0.40, 0.41, 0.46, 0.53, 0.63, 0.73, 0.87, 0.97)
# Tests that the prior is worth, and tests after which an old one counts 1/e.
_WEIGHT, _MEMORY = 8.0, 256.0
# Drafts that make a mean.
_MIN_ENDED = 6


class ConfidenceRates:
    """Acceptance of a source's tokens by class of confidence, of greedy or sampled requests."""

    def __init__(self, is_greedy: bool) -> None:
        priors = _GREEDY_PRIOR if is_greedy else _SAMPLED_PRIOR
        self._rates = [Rate(prior, _WEIGHT, _MEMORY) for prior in priors]

    def values(self) -> list[float]:
        """Return the acceptance of each class."""
        return [rate.value for rate in self._rates]

    def add_draft(self, classes: Sequence[int], num_accepted: int) -> None:
        """Add the test of a draft's tokens, of these classes."""
        tested = classes[: num_accepted + 1]
        for place, index in enumerate(tested):
            self._rates[index].add(1, int(place < num_accepted))
        for index, rate in enumerate(self._rates):
            if index not in tested:  # a class that is never drafted is tried again some day
                rate.fade()


@dataclass
class StopRule:
    """Ends each row's draft where its next token would make the batch slower.

    With ``n`` drafted tokens a row emits ``1 + A_1 + ... + A_n`` tokens, where ``A_j`` is the
    chance that all of the first ``j`` are accepted, in ``T_n`` seconds. A token is worth it if it
    raises the logarithm of tokens by more than that of seconds, once for each request that waits
    (``planner.py``). Nothing here depends on a token's own draw, so the test of a proposal stays
    exact: given the tokens before it, a token is drafted or not, whichever it would be.

    Args:
        name: the source.
        base_s: seconds of the step, or of the round, without drafted tokens.
        pass_s: of a pass of the draft, which the rows share.
        verify_s: that verifying 0, 1 ... tokens of a row adds, for each row.
        num_reqs: requests that wait for it.
        rates: acceptance by class of confidence, for each row; None where the rule does not apply.
        means: acceptance of a token that is not drafted yet, for each row.
    """

    name: str
    base_s: float
    pass_s: float
    verify_s: Sequence[Sequence[float]]
    num_reqs: int
    rates: list[list[float] | None]
    means: list[float]
    classes: list[list[int]] = field(default_factory=list)
    """Classes of the tokens that each row drafts."""

    def __post_init__(self) -> None:
        self.classes = [[] for _ in self.rates]
        self._tokens = [1.0] * len(self.rates)
        self._chances = [1.0] * len(self.rates)

    def keeps(self, row: int, confidence: float) -> bool:
        """True if a row takes the token whose pass has been made.

        Args:
            confidence: largest probability of the token's distribution.
        """
        rates = self.rates[row]
        if rates is None:
            return True
        index = bisect(_BOUNDS, confidence)
        chance = self._chances[row] * rates[index]
        count = len(self.classes[row])
        if not self._pays(row, chance, (count, count + 1), (count + 1, count + 1)):
            return False
        self._chances[row] = chance
        self._tokens[row] += chance
        self.classes[row].append(index)
        return True

    def goes_on(self, row: int) -> bool:
        """True if another pass pays for a row."""
        if self.rates[row] is None:
            return True
        count = len(self.classes[row])
        chance = self._chances[row] * self.means[row]
        return self._pays(row, chance, (count, count), (count + 1, count + 1))

    def _pays(
        self, row: int, more_tokens: float, before: tuple[int, int], after: tuple[int, int]
    ) -> bool:
        """True if ``more_tokens`` are worth going from one number of tokens and passes to another.

        Args:
            before, after: tokens to verify, and passes.
        """
        gain = 1 + more_tokens / self._tokens[row]
        return gain > (self._seconds(row, *after) / self._seconds(row, *before)) ** self.num_reqs

    def _seconds(self, row: int, num_tokens: int, num_passes: int) -> float:
        passes_s = num_passes * self.pass_s / len(self.rates)
        return self.base_s + self.verify_s[row][num_tokens] + passes_s


class StopRules:
    """Makes the rules of an engine, and learns from the drafts that they ended.

    There are none where lengths are not chosen.

    Args:
        controller: the engine's ``Controller``.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._acceptance = controller.acceptance
        self._rates: dict[tuple[str, bool, bool], ConfidenceRates] = {}
        """By source, through level 2, of greedy requests."""
        self._classes: dict[str, tuple[str, list[int], int]] = {}
        """Of each request's newest direct draft, if a rule could end it: its source, the classes of
        its tokens, and its passes."""
        self._ended: dict[tuple[str, bool], EndedDrafts] = {}
        """By source, of greedy requests."""

    def expected(self, name: str, candidate: Candidate) -> EndedDrafts | None:
        """Return the expected direct draft of a request; None if it is not known.

        The engine's mean, scaled to the request's acceptance.
        """
        ended = self._ended.get((name, candidate.is_greedy))
        if candidate.has_seed or not self._ends_direct or ended is None:
            return None
        if ended.count < _MIN_ENDED:
            return None
        of_request = self._acceptance.of(candidate.request_id, candidate.is_greedy)
        engine = self._acceptance.greedy if candidate.is_greedy else self._acceptance.sampled
        scale = of_request.of(name, False, 0).value / max(1e-3, engine.of(name, False, 0).value)
        return replace(ended, tokens=ended.tokens * scale)

    @property
    def _ends_direct(self) -> bool:
        return "length" in self._controller.chooses

    def direct(self, name: str, candidates: Sequence[Candidate], num_plain: int) -> StopRule | None:
        """Return the rule for drafts that go straight to the full pass.

        Args:
            candidates: whose drafts these are.
            num_plain: other requests of the batch.
        """
        if not self._ends_direct:
            return None
        longest = self._controller.config.num_speculative_tokens
        costs = self._controller.step_costs(candidates, num_plain)
        model, counts = costs.model, np.arange(longest + 1)
        num_reqs = len(candidates) + num_plain
        attention = model.attention_table([c.context for c in candidates], longest + 1)
        rows_s = np.array([model.rows(num_reqs + int(n)) for n in counts])
        scale = model.attention_scales(num_reqs, len(candidates))[1]
        tests_s = np.outer([model.draft_seconds(c.is_greedy) for c in candidates], counts)
        further_s = attention[:, 1 : longest + 2] - attention[:, 1:2]
        verify_s = rows_s - rows_s[0] + scale * further_s + tests_s
        ids, has_seed = [c.request_id for c in candidates], [c.has_seed for c in candidates]
        base_s, pass_s = costs.plain_s + costs.speculating_s, model.draft(len(candidates))
        rates, means = self._known(name, False, ids, has_seed)
        return StopRule(name, base_s, pass_s, verify_s.tolist(), num_reqs, rates, means)

    def round(
        self, name: str, request_ids: Sequence[str], has_seed: Sequence[bool]
    ) -> StopRule | None:
        """Return the rule for a round's drafts for level 2."""
        if not {"length", "gamma"} <= self._controller.chooses:
            return None
        model, num_rows = self._controller.model, len(request_ids)
        is_greedy = all(map(self._acceptance.is_greedy, request_ids))
        seconds = [
            model.level2(num_rows, n + 1) + model.test_seconds(num_rows * (n + 1), is_greedy)
            for n in range(self._controller.config.gamma + 1)
        ]
        # In ``seconds`` all rows have the same number of tokens.
        verify_s = [[(s - seconds[0]) / num_rows for s in seconds]] * num_rows
        rates, means = self._known(name, True, request_ids, has_seed)
        pass_s = model.draft(num_rows)
        return StopRule(name, seconds[0], pass_s, verify_s, num_rows, rates, means)

    def _known(
        self, name: str, through_level2: bool, ids: Sequence[str], has_seed: Sequence[bool]
    ) -> tuple[list[list[float] | None], list[float]]:
        """Return ``rates`` and ``means`` of a rule."""
        rates: list[list[float] | None] = []
        for request_id, seeded in zip(ids, has_seed):
            # A seeded request's samples depend on its lengths, which must not depend on costs.
            by_class = self._rates_of(name, through_level2, request_id).values()
            rates.append(None if seeded else by_class)
        means = [self._acceptance.of(i).of(name, through_level2, 0).value for i in ids]
        return rates, means

    def _rates_of(self, name: str, through_level2: bool, request_id: str) -> ConfidenceRates:
        """Return the rates of requests like this one."""
        is_greedy = self._acceptance.is_greedy(request_id)
        key = name, through_level2, is_greedy
        return self._rates.setdefault(key, ConfidenceRates(is_greedy))

    def ended(
        self,
        candidates: Sequence[Candidate],
        num_planned: Sequence[int],
        rule: StopRule,
        num_passes: int,
    ) -> None:
        """Keep the classes of direct drafts that have ended, and correct the present plan.

        Args:
            num_planned: tokens of each request by ``Controller.choose()``.
        """
        model, name = self._controller.model, rule.name
        expected = [self.expected(name, candidate) for candidate in candidates]
        planned_passes = max(n if e is None else e.passes for n, e in zip(num_planned, expected))
        tokens, seconds = 0, (num_passes - planned_passes) * rule.pass_s
        for row, (candidate, planned) in enumerate(zip(candidates, num_planned)):
            if rule.rates[row] is None:
                continue
            count = len(rule.classes[row])
            if count:
                self._classes[candidate.request_id] = name, rule.classes[row], num_passes
            else:
                self._mean_of(name, candidate.request_id).add(0.0, 0, num_passes)
            tokens += count - planned
            seconds += rule.verify_s[row][count] - rule.verify_s[row][planned]
            seconds -= (count - planned) * model.draft_seconds(candidate.is_greedy)
        self._controller.add_to_plan(tokens, seconds)

    def observe_direct(
        self,
        request_id: str,
        name: str,
        num_drafted: int,
        num_accepted: int,
        probs: Sequence[float] | None,
    ) -> int:
        """Learn from the full pass's test of a direct draft.

        Args:
            probs: probability of acceptance of each token, if known.

        Returns:
            Number of first tokens whose tests say how good the source is. Further tokens of a draft
            that a rule could end were drafted because they were likely.
        """
        drafted_by, classes, num_passes = self._classes.pop(request_id, ("", [], 0))
        if drafted_by != name:
            return num_drafted
        self._rates_of(name, False, request_id).add_draft(classes[:num_drafted], num_accepted)
        if num_drafted == len(classes):
            expected = float(np.cumprod(probs).sum()) if probs else num_accepted
            self._mean_of(name, request_id).add(expected, num_drafted, num_passes)
        return 1

    def _mean_of(self, name: str, request_id: str) -> EndedDrafts:
        """Return the means of requests like this one."""
        key = name, self._acceptance.is_greedy(request_id)
        return self._ended.setdefault(key, EndedDrafts())

    def observe_round(
        self,
        request_id: str,
        source: str | None,
        confidence: int | None,
        num_drafted: int,
        num_accepted: int,
        classes: Sequence[int],
    ) -> None:
        """Learn from level 2's test of a round's draft; ``source`` is None for no draft.

        Args:
            classes: of the tokens, if a rule could end the draft; as for ``observe_direct()``.
        """
        num_fair = num_drafted
        if classes and source is not None:
            self._rates_of(source, True, request_id).add_draft(classes[:num_drafted], num_accepted)
            num_fair = 1
        self._acceptance.observe_round(
            request_id, source, confidence, num_drafted, num_accepted, num_fair
        )

    def release(self, request_id: str) -> None:
        self._classes.pop(request_id, None)
