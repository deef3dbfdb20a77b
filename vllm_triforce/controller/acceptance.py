"""How often a level's tokens are accepted: exponentially weighted, per request and engine-wide."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_triforce.controller.routes import Route, SourceTraits


@dataclass
class Rate:
    """Share of tested tokens that were accepted, the newer ones weighing more.

    Tokens behind a rejected one are not tested. With ``a`` accepted and ``r`` rejected tests, both
    forgotten exponentially, and a prior worth ``weight`` tests, the estimate is
    ``(a + weight * prior) / (a + r + weight)``.

    Args:
        prior: the estimate before anything was tested.
        weight: tests that the prior is worth.
        memory: tests after which one counts 1/e.
    """

    prior: float
    weight: float
    memory: float
    accepted: float = 0.0
    rejected: float = 0.0
    num_misses: int = 0
    """Drafts in a row of which not even the first token was accepted."""

    @property
    def value(self) -> float:
        tests = self.accepted + self.rejected + self.weight
        return (self.accepted + self.weight * self.prior) / tests

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Of one draft: its accepted prefix, and a rejection if there is more of it."""
        num_rejected = int(num_accepted < num_drafted)
        keep = max(0.0, 1 - (num_accepted + num_rejected) / self.memory)
        self.accepted = self.accepted * keep + num_accepted
        self.rejected = self.rejected * keep + num_rejected
        self.num_misses = 0 if num_accepted else self.num_misses + num_rejected
        if num_rejected and (1 - self.value) ** self.num_misses < _SURPRISING:
            # The text has changed: what was accepted before it says nothing, and the prior is
            # outweighed. A rejected draft is one test, an accepted one many: that would take long.
            self.accepted = 0.0
            self.rejected += self.weight

    def fade(self, share: float | None = None) -> None:
        """Forgets a little of a rate that is not tested, so that it is tried again some time."""
        keep = 1 - (1 / (8 * self.memory) if share is None else share)
        self.accepted *= keep
        self.rejected *= keep


# What a draft that does better than level 2 did makes forget of level 2.
_DOUBT = 1 / 16
# Chance below which a run of misses is not taken for bad luck.
_SURPRISING = 1e-4

# What may be hoped for of level 3, acceptance of level 2's tokens per test: 0.96 by
# docs/results.md. What may be hoped for of level 2 is each source's to say.
LEVEL2_PRIOR = 0.95
ROUND_PRIOR = 2.0
"""Tokens that a round of level 1 and level 2 adds."""

CAUTION = 0.8
"""Share of what may be hoped for of level 3, with level 2's and a draft model's tokens, that an
engine begins with. Where that pays everybody speculates; elsewhere single requests try, within what
may be spent on finding out. With all of it a batch's first proposals are too many and too long, and
the disappointment is taken for proposals' gaining less than their acceptance (``Gain``). Tokens
that take no passes cost little to try."""

# Tests after which an old one counts 1/e: within a request text changes, an engine's users do less.
_REQUEST_MEMORY, _ENGINE_MEMORY = 48.0, 512.0
# Tests that the estimate it begins with is worth: to the engine a guess, to a request the engine's
# experience. Less, and two unlucky tokens at the start would end speculation for a good request.
_ENGINE_WEIGHT, _REQUEST_WEIGHT = 2.0, 6.0
# Expected tokens after which a correction of them counts half: a few proposals.
_GAIN_WEIGHT = 16.0


@dataclass
class Rates:
    """The estimates that choices are made by."""

    level2: Rate
    """Level 3 of level 2's tokens."""
    level1: dict[tuple[str, bool], list[Rate]]
    """Of level 1's tokens, by their source and whether they go through level 2, which tests them
    then, and level 3 else; each by class of confidence."""
    round_tokens: float = ROUND_PRIOR
    """Tokens that a round adds."""

    def add_round(self, num_tokens: float) -> None:
        self.round_tokens += (num_tokens - self.round_tokens) / 16

    def doubt_level2(self) -> None:
        """A draft is accepted more often than level 2 was, which reads more and with the target's
        weights: what is known of level 2 is of another text, and fades."""
        self.level2.fade(_DOUBT)
        self.round_tokens += _DOUBT * max(0.0, ROUND_PRIOR - self.round_tokens)
        for (_, through_level2), by_confidence in self.level1.items():
            if through_level2:
                for rate in by_confidence:
                    rate.fade(_DOUBT)

    def of(self, source: str, through_level2: bool, confidence: int) -> Rate:
        return self.level1[source, through_level2][confidence]

    @classmethod
    def hoped(cls, sources: Sequence[SourceTraits]) -> "Rates":
        """What may be hoped for."""
        return cls.of_engine(sources, caution=1.0)

    @classmethod
    def of_engine(cls, sources: Sequence[SourceTraits], caution: float = CAUTION) -> "Rates":
        def rate(prior: float) -> Rate:
            return Rate(prior, _ENGINE_WEIGHT, _ENGINE_MEMORY)

        level1 = {}
        for source in sources:
            share = LEVEL2_PRIOR * (caution if source.takes_passes else 1.0)
            level1[source.name, True] = [rate(hope) for hope in source.hopes]
            level1[source.name, False] = [rate(share * hope) for hope in source.hopes]
        return cls(rate(caution * LEVEL2_PRIOR), level1)

    @classmethod
    def of_request(cls, engine: "Rates") -> "Rates":
        def rate(of: Rate) -> Rate:
            return Rate(of.value, _REQUEST_WEIGHT, _REQUEST_MEMORY)

        return cls(
            rate(engine.level2),
            {way: [rate(of) for of in rates] for way, rates in engine.level1.items()},
            engine.round_tokens,
        )


@dataclass
class Gain:
    """Tokens that proposals gained over those that were expected of them.

    What is chosen for looking best is more often overrated than underrated, and tokens are not
    accepted independently of each other: this is by how much expectations have to be corrected.
    It begins as if ``_GAIN_WEIGHT`` tokens had been expected and come.
    """

    expected: float = 0.0
    found: float = 0.0

    @property
    def value(self) -> float:
        return (self.found + _GAIN_WEIGHT) / (self.expected + _GAIN_WEIGHT)

    def add(self, expected: float, found: float) -> None:
        keep = max(0.0, 1 - expected / _ENGINE_MEMORY)
        self.expected = self.expected * keep + expected
        self.found = self.found * keep + found


class Acceptance:
    """Everybody's estimates; a request begins with the engine's for its kind: sampled tokens are
    accepted less often than greedy ones."""

    def __init__(self, sources: Sequence[SourceTraits]) -> None:
        self.greedy, self.sampled = Rates.of_engine(sources), Rates.of_engine(sources)
        self.requests: dict[str, tuple[Rates, bool]] = {}
        """Each request's, and whether it is greedy."""
        self.gains: dict[tuple[Route, bool], Gain] = defaultdict(Gain)
        """By route, and whether the request is greedy."""

    def of(self, request_id: str, is_greedy: bool = True) -> Rates:
        found = self.requests.get(request_id)
        if found is None:
            engine = self.greedy if is_greedy else self.sampled
            found = self.requests[request_id] = Rates.of_request(engine), is_greedy
        return found[0]

    def is_greedy(self, request_id: str) -> bool:
        return self.requests[request_id][1]

    def both(self, request_id: str) -> tuple[Rates, Rates]:
        """The request's and the engine's."""
        rates = self.of(request_id)
        return rates, self.greedy if self.is_greedy(request_id) else self.sampled

    def gains_by_route(self, is_greedy: bool) -> dict[Route, float]:
        """Factors on expected tokens."""
        return {route: gain.value for (route, is_), gain in self.gains.items() if is_ == is_greedy}

    def release(self, request_id: str) -> None:
        self.requests.pop(request_id, None)


def expected_by_length(rate, most: int) -> np.ndarray:
    """Tokens accepted of a draft of 0, 1 ... ``most``, each with probability ``rate`` while none
    was rejected: rate + rate**2 + ... (arXiv 2211.17192, equation 1, without the bonus token).

    Args:
        rate: a number, or an array of [..., 1].

    Returns:
        [..., most + 1]
    """
    powers = np.asarray(rate, dtype=np.float64) ** np.arange(most + 1)
    return np.cumsum(powers, axis=-1) - 1  # of length 0: rate**0 - 1
