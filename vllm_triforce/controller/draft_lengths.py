"""Lengths of drafts, in rounds by the acceptance of their source, and of direct drafts.

A direct draft ends by a draft model's distributions, which say how likely its tokens are accepted.
The confidence of a token is the largest probability of the distribution that it is drawn from.
Eight classes of confidence have an acceptance each, learned from tests. A draft of ``n`` tokens
with chances ``A_j`` that all of the first ``j`` are accepted gives ``1 + A_1 + ... + A_n`` tokens
in ``T_n`` seconds. A draft is continued while the next token raises the logarithm of
tokens by more than that of seconds, once for each request that waits (``planner.py``).

The decision reads the draft's distributions, never the tokens drawn from them, so ending a draft
does not bias rejection sampling.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance, Rate, expected_by_length
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.planner import StepCosts
from vllm_triforce.controller.routes import Candidate, MatchClass, SourceTraits

# Upper bounds of a class: the largest probability of the distribution that a token is drawn from.
_BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
# Acceptance by class of SmolLM2's head, at T=0 and 1 (docs/results.md).
_GREEDY_PRIOR = (0.15, 0.34, 0.50, 0.70, 0.83, 0.92, 0.99, 1.00)
_SAMPLED_PRIOR = (0.40, 0.41, 0.46, 0.53, 0.63, 0.73, 0.87, 0.97)
# Tests that the prior is worth, and tests after which an old one counts 1/e.
_WEIGHT, _MEMORY = 8.0, 256.0


class DraftLengths:
    """Source and length of a round's draft, by the tokens that a round adds per second.

    The first of ``sources`` wins where several add the same.
    """

    def __init__(
        self, config: ResolvedConfig, sources: Sequence[SourceTraits], acceptance: Acceptance
    ) -> None:
        self._config = config
        self._sources = sources
        self._acceptance = acceptance
        self._model: CostModel
        self._round_s: dict[tuple[int, bool], np.ndarray] = {}

    def use_costs(self, model: CostModel) -> None:
        self._model = model
        self._round_s.clear()

    def best(
        self,
        request_id: str,
        match_classes: Mapping[str, MatchClass | None],
        num_rows: int,
        max_tokens: int,
    ) -> tuple[str | None, int]:
        """Return the fastest source of a round's draft, None for no draft, and the length.

        Args:
            match_classes: by source, None for no tokens.
            num_rows: requests in this round.
            max_tokens: that level 2 has room for.
        """
        rates = self._acceptance.of(request_id)
        best: tuple[str | None, int] = None, 0
        best_speed = 0.0
        for source in self._sources:
            index = source.match_class(match_classes)
            if index is None:
                continue
            longest = min(self._config.gamma, max_tokens) if source.takes_passes else max_tokens
            by_place = np.array(rates.by_place(source.name, True, index, longest))
            round_s = self._round_seconds(num_rows, source.takes_passes)
            speeds = (1 + expected_by_length(by_place)) / round_s[: longest + 1]
            if (speed := float(speeds.max())) > best_speed:
                best, best_speed = (source.name, int(speeds.argmax())), speed
        return best

    def _round_seconds(self, num_rows: int, takes_passes: bool) -> np.ndarray:
        """Return the seconds of rounds with drafts of 0, 1 ... tokens, [max_tokens + 1]."""
        key = num_rows, takes_passes
        if key not in self._round_s:
            model, num_lengths = self._model, self._config.num_speculative_tokens + 1
            drafts_s = takes_passes * model.draft(num_rows) * np.arange(num_lengths)
            level2_s = [model.level2(num_rows, n + 1) for n in range(num_lengths)]
            self._round_s[key] = drafts_s + np.array(level2_s)
        return self._round_s[key]


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
    """Ends each row's draft where its next token would make the batch slower."""

    source: str
    base_s: float  # of the step without drafted tokens
    pass_s: float  # of a pass of the draft, which the rows share
    verify_s: Sequence[Sequence[float]]  # of verifying 0, 1 ... tokens of a row, for each row
    num_reqs: int  # that wait for it
    rates: list[list[float] | None]
    """Acceptance by class of confidence, for each row; None where the rule does not apply."""
    means: list[float]  # acceptance of a token that is not drafted yet, for each row
    classes: list[list[int]] = field(default_factory=list)
    """Classes of the tokens that each row drafts."""

    def __post_init__(self) -> None:
        self.classes = [[] for _ in self.rates]
        self._tokens = [1.0] * len(self.rates)
        self._chances = [1.0] * len(self.rates)

    def keeps(self, row: int, top_prob: float) -> bool:
        """True if a row takes the token whose pass has been made, by its largest probability."""
        rates = self.rates[row]
        if rates is None:
            return True
        index = bisect(_BOUNDS, top_prob)
        chance = self._chances[row] * rates[index]
        if not self._pays(row, chance, len(self.classes[row]) + 1):
            return False
        self._chances[row] = chance
        self._tokens[row] += chance
        self.classes[row].append(index)
        return True

    def goes_on(self, row: int) -> bool:
        """True if another pass pays for a row."""
        if self.rates[row] is None:
            return True
        return self._pays(row, self._chances[row] * self.means[row], len(self.classes[row]))

    def _pays(self, row: int, chance: float, num_passes: int) -> bool:
        """True if a row's next token, of this chance, pays after ``num_passes`` passes."""
        count, gain = len(self.classes[row]), 1 + chance / self._tokens[row]
        slowdown = self._seconds(row, count + 1, count + 1) / self._seconds(row, count, num_passes)
        return gain > slowdown**self.num_reqs

    def _seconds(self, row: int, num_tokens: int, num_passes: int) -> float:
        passes_s = num_passes * self.pass_s / len(self.rates)
        return self.base_s + self.verify_s[row][num_tokens] + passes_s


class StopRules:
    """Makes the rules of an engine, and learns from the drafts that they could end."""

    def __init__(self, config: ResolvedConfig, acceptance: Acceptance) -> None:
        self._config = config
        self._acceptance = acceptance
        self._rates: dict[tuple[str, bool], ConfidenceRates] = {}
        """By source, of greedy requests."""
        self._classes: dict[str, tuple[str, list[int]]] = {}
        """Last direct draft by request: source, confidence classes."""

    def for_direct_draft(
        self, source: str, candidates: Sequence[Candidate], costs: StepCosts
    ) -> StopRule:
        """Return the rule for drafts that go straight to the full pass."""
        model, num_reqs = costs.model, len(candidates) + costs.num_plain
        verify_s = model.verification(
            [c.context for c in candidates],
            [c.is_greedy for c in candidates],
            num_reqs,
            self._config.num_speculative_tokens,
        )
        base_s, pass_s = costs.plain_s + costs.speculating_s, model.draft(len(candidates))
        # A seeded request's samples depend on its lengths, which must not depend on costs.
        rates = [
            None if c.has_seed else self._of(source, c.request_id).values() for c in candidates
        ]
        means = [self._acceptance.of(c.request_id).of(source, False, 0).value for c in candidates]
        return StopRule(source, base_s, pass_s, verify_s.tolist(), num_reqs, rates, means)

    def on_draft_end(
        self,
        candidates: Sequence[Candidate],
        num_planned: Sequence[int],
        rule: StopRule,
        num_passes: int,
    ) -> tuple[int, float]:
        """Keep the classes of ended direct drafts; return drafts and seconds beyond the plan."""
        tokens, seconds = 0, (num_passes - max(num_planned)) * rule.pass_s
        for row, (candidate, planned) in enumerate(zip(candidates, num_planned)):
            if rule.rates[row] is None:
                continue
            classes = rule.classes[row]
            if classes:  # else nothing will be tested
                self._classes[candidate.request_id] = rule.source, classes
            more = len(classes) - planned
            tokens += more
            seconds += rule.verify_s[row][len(classes)] - rule.verify_s[row][planned]
        return tokens, seconds

    def observe_direct(
        self, request_id: str, source: str, num_drafted: int, num_accepted: int
    ) -> int:
        """Learn from the full pass's test of a direct draft.

        Returns:
            Number of first tokens whose tests are unbiased. Further tokens of a draft that a rule
            could end were drafted because they were likely.
        """
        drafted_by, classes = self._classes.pop(request_id, ("", []))
        if drafted_by != source:
            return num_drafted
        self._of(source, request_id).add_draft(classes[:num_drafted], num_accepted)
        return 1

    def release(self, request_id: str) -> None:
        self._classes.pop(request_id, None)

    def _of(self, source: str, request_id: str) -> ConfidenceRates:
        """Return the rates of requests like this one."""
        is_greedy = self._acceptance.is_greedy(request_id)
        return self._rates.setdefault((source, is_greedy), ConfidenceRates(is_greedy))
