"""Acceptance of proposed tokens: exponentially weighted, per request and for the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_triforce.controller.routes import HIERARCHICAL, Choice, MatchClass, SourceTraits

LEVEL2_PRIOR = 0.95
"""Prior acceptance of level 2's tokens; docs/results.md has 0.943 to 0.955 of SmolLM2."""
ROUND_PRIOR, LOOKUP_ROUND_PRIOR = 2.0, 1.5
"""Prior tokens of a round of levels 1 and 2: with a draft model, and with prompt lookup alone. Six
drafted tokens of prompt lookup gave SmolLM2 1.5 at T=1 (docs/results.md)."""
CAUTION = 0.95
"""Factor on the priors of level 2 and of the draft model's direct route at an engine's start."""

# Tests after which an old one counts 1/e. With 512 for the engine, traffic that becomes good again
# is found after more than 1,500 steps; with 128 after 750.
_REQUEST_MEMORY, _ENGINE_MEMORY = 64.0, 128.0
# Tests that the prior is worth: a guess for the engine; the engine's estimate for a request, which
# two unlucky tokens at the start must not outweigh.
_ENGINE_WEIGHT, _REQUEST_WEIGHT = 2.0, 6.0
# Chance below which a run of rejected proposals is a change of the text.
_SURPRISING = 1e-4


@dataclass
class Rate:
    """Share of tested tokens that were accepted.

    Tokens after the first rejection are not tested. With ``a`` accepted and ``r`` rejected tests,
    the estimate is ``(a + weight * prior) / (a + r + weight)``. All three are forgotten
    exponentially; without tests, ``weight`` comes back.
    """

    prior: float  # the estimate without tests
    weight: float  # tests that the prior is worth
    memory: float  # tests after which one counts 1/e
    accepted: float = 0.0
    rejected: float = 0.0
    num_misses: int = 0
    """Proposals in a row without an accepted token."""
    _prior_share: float = 1.0
    """Share of ``weight`` that is left."""

    @property
    def value(self) -> float:
        weight = self.weight * self._prior_share
        tests = self.accepted + self.rejected + weight
        return (self.accepted + weight * self.prior) / tests

    def add(
        self, num_drafted: int, num_accepted: int, probs: Sequence[float] | None = None
    ) -> None:
        """Add a proposal.

        Args:
            probs: probability of acceptance of each token, which counts as a test. Without them,
                ``num_accepted`` tests are added, and a rejected one if the proposal was longer.
        """
        num_rejected = int(num_accepted < num_drafted)
        num_tests, accepted = num_accepted + num_rejected, float(num_accepted)
        if probs:
            num_tests, accepted = len(probs), sum(probs)
        keep = max(0.0, 1 - num_tests / self.memory)
        self.accepted = self.accepted * keep + accepted
        self.rejected = self.rejected * keep + num_tests - accepted
        self._prior_share *= keep
        self.num_misses = 0 if num_accepted else self.num_misses + num_rejected
        if num_rejected and (1 - self.value) ** self.num_misses < _SURPRISING:
            # The text has changed. A rejected proposal is one test and an accepted one many, so
            # forgetting at the usual pace would take long.
            self.accepted = 0.0
            self.rejected += self.weight

    def fade(self) -> None:
        """Forget a little of an estimate that is not tested, so that it is tried again."""
        keep = 1 - 1 / (8 * self.memory)
        self.accepted *= keep
        self.rejected *= keep
        self._prior_share = 1 - keep * (1 - self._prior_share)


@dataclass
class Rates:
    """Estimates of one request, or of all of an engine's."""

    level2: Rate  # of level 2's tokens by the full pass
    level1: dict[tuple[str, bool], list[Rate]]
    """Of level 1's tokens by match class, by (source, through level 2): level 2 tests them where
    True, the full pass where False. Each token of a draft is one class above the token before it,
    up to the last class."""
    round_tokens: float = ROUND_PRIOR  # that a round of levels 1 and 2 adds

    @classmethod
    def prior(cls, sources: Sequence[SourceTraits], caution: float = 1.0) -> "Rates":
        """Begin with ``caution`` times the priors of level 2 and of sources that take passes."""

        def rate(prior: float) -> Rate:
            return Rate(prior, _ENGINE_WEIGHT, _ENGINE_MEMORY)

        level1 = {}
        for source in sources:
            share = LEVEL2_PRIOR * (caution if source.takes_passes else 1.0)
            level1[source.name, True] = [rate(p) for p in source.prior_acceptance]
            level1[source.name, False] = [rate(share * p) for p in source.prior_acceptance]
        has_model = any(source.takes_passes for source in sources)
        round_tokens = ROUND_PRIOR if has_model else LOOKUP_ROUND_PRIOR
        return cls(rate(caution * LEVEL2_PRIOR), level1, round_tokens)

    @classmethod
    def of_request(cls, engine: "Rates") -> "Rates":
        """Begin with the engine's estimates."""

        def rate(of: Rate) -> Rate:
            return Rate(of.value, _REQUEST_WEIGHT, _REQUEST_MEMORY)

        return cls(
            rate(engine.level2),
            {key: [rate(of) for of in rates] for key, rates in engine.level1.items()},
            engine.round_tokens,
        )

    def of(self, source: str, through_level2: bool, match_class: int) -> Rate:
        return self.level1[source, through_level2][match_class]

    def by_place(
        self, source: str, through_level2: bool, match_class: MatchClass, num_tokens: int
    ) -> list[float]:
        """Return the acceptance of each token of a draft, 0 of those that it lacks."""
        rates = self.level1[source, through_level2]
        if isinstance(match_class, tuple):
            values = [rates[index].value for index in match_class[:num_tokens]]
            return values + [0.0] * (num_tokens - len(values))
        values = [rate.value for rate in rates[match_class : match_class + num_tokens]]
        return values + [rates[-1].value] * (num_tokens - len(values))

    def add_draft(
        self,
        source: str,
        through_level2: bool,
        match_class: MatchClass,
        num_drafted: int,
        num_accepted: int,
        probs: Sequence[float] | None = None,
    ) -> None:
        """Add the test of a draft; ``probs``, of each token, are of a source with one class."""
        if isinstance(match_class, tuple):
            for place, index in enumerate(match_class[: min(num_drafted, num_accepted + 1)]):
                self.of(source, through_level2, index).add(1, int(place < num_accepted))
            return
        *rates, last = self.level1[source, through_level2][match_class:]
        for rate in rates:
            if not num_drafted:
                return
            rate.add(1, min(1, num_accepted))
            if not num_accepted:
                return
            num_drafted, num_accepted = num_drafted - 1, num_accepted - 1
        if num_drafted:
            last.add(num_drafted, num_accepted, probs)

    def relate(self, source: str, was_direct: bool) -> None:
        """Let the prior of the other way of a model's tokens follow the one that was just tested.

        Straight to the full pass they are accepted about as often as by level 2 and then by the
        full pass.
        """
        through, direct = self.of(source, True, 0), self.of(source, False, 0)
        if was_direct:
            through.prior = min(1.0, direct.value / max(0.01, self.level2.value))
        else:
            direct.prior = CAUTION * through.value * self.level2.value


class Acceptance:
    """Estimates of all requests, and the engine's, which a new request begins with.

    Greedy and sampled requests are apart: sampled tokens are accepted less often.
    """

    def __init__(self, sources: Sequence[SourceTraits]) -> None:
        self.with_passes = {source.name for source in sources if source.takes_passes}
        """Sources that draft by passes of the draft model."""
        self.greedy = Rates.prior(sources, CAUTION)
        self.sampled = Rates.prior(sources, CAUTION)
        self.requests: dict[str, tuple[Rates, bool]] = {}
        """Estimates of each request, and True if it is greedy."""

    def of(self, request_id: str, is_greedy: bool = True) -> Rates:
        """Return a request's estimates; a new one is of the given kind."""
        if request_id not in self.requests:
            self.requests[request_id] = Rates.of_request(self.of_engine(is_greedy)), is_greedy
        return self.requests[request_id][0]

    def of_engine(self, is_greedy: bool) -> Rates:
        """Return the engine's estimates for greedy or sampled requests."""
        return self.greedy if is_greedy else self.sampled

    def is_greedy(self, request_id: str) -> bool:
        return self.requests[request_id][1]

    def request_and_engine_rates(self, request_id: str) -> tuple[Rates, Rates]:
        """Return the estimates of a request, and of the engine for requests like it."""
        return self.of(request_id), self.of_engine(self.is_greedy(request_id))

    def observe_rounds(
        self,
        request_id: str,
        source: str | None,
        match_class: MatchClass | None,
        num_rounds: int,
        accepted: int,
        rejected: int,
    ) -> None:
        """Learn from level 2's tests of a source's tokens, in rounds that follow one another.

        Args:
            source, match_class: None for no draft.
            rejected: rounds in which level 2 rejected a token.
        """
        for rates in self.request_and_engine_rates(request_id):
            for _ in range(num_rounds):
                rates.round_tokens += (accepted / num_rounds + 1 - rates.round_tokens) / 16
            if source is not None and match_class is not None:
                rates.add_draft(source, True, match_class, accepted + (rejected > 0), accepted)
                for _ in range(rejected - 1):
                    rates.add_draft(source, True, match_class, 1, 0)
                self._relate(rates, source, was_direct=False)
            for other in self.with_passes - {source}:
                rates.of(other, True, 0).fade()

    def observe_full_pass(
        self,
        request_id: str,
        choice: Choice,
        num_drafted: int,
        num_accepted: int,
        probs: Sequence[float] | None = None,
    ) -> None:
        """Learn from the full pass's test of a proposal.

        Args:
            probs: probability of acceptance of each token. After a rejection these are unbiased for
                level 2 and the draft model, whose tokens follow the rejected one. They are too high
                for prompt lookup, whose match ignores the rejection, so it learns from outcomes.
        """
        takes_passes = choice.route in self.with_passes
        model_probs = probs[:num_drafted] if probs and takes_passes else None
        for rates in self.request_and_engine_rates(request_id):
            if choice.route == HIERARCHICAL:
                rates.level2.add(num_drafted, num_accepted, probs)
            elif choice.match_class is not None:
                rates.add_draft(
                    choice.route, False, choice.match_class, num_drafted, num_accepted, model_probs
                )
                self._relate(rates, choice.route, was_direct=True)

    def _relate(self, rates: Rates, source: str, was_direct: bool) -> None:
        if source in self.with_passes:
            rates.relate(source, was_direct)

    def release(self, request_id: str) -> None:
        self.requests.pop(request_id, None)


def expected_by_length(
    acceptance: np.ndarray,  # of each token if none was rejected before, [..., max_tokens]
) -> np.ndarray:  # [..., max_tokens + 1]
    """Return the expected accepted tokens of proposals of 0, 1 ... ``max_tokens``.

    ``a_1 + a_1 a_2 + ...``: equation 1 of arXiv 2211.17192 without the bonus token, where each
    token has its own acceptance.
    """
    *shape, max_tokens = acceptance.shape
    expected = np.zeros((*shape, max_tokens + 1))
    expected[..., 1:] = acceptance.cumprod(-1).cumsum(-1)
    return expected
