"""How often a level's tokens are accepted: exponentially weighted, per request and engine-wide."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from vllm_triforce.controller.choice import Route

# Matches longer than this are counted together: what followed a long match is nearly certain.
LONGEST_MATCH = 8


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

    def fade(self) -> None:
        """Forgets a little of a rate that is not tested, so that it is tried again some time."""
        self.accepted *= 1 - 1 / (8 * self.memory)
        self.rejected *= 1 - 1 / (8 * self.memory)


# What may be hoped for, acceptance per test as docs/results/2026-11-21-cpu.md found it: level 3 of
# level 2's tokens 0.96, level 2 of the draft's 0.5. Of looked-up tokens by the length of the match
# (docs/results/2026-11-21-cpu.md: 0.62 in all); they only decide what is tried first.
LEVEL2_PRIOR = 0.95
DRAFT_PRIOR = 0.5
LOOKUP_PRIORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
ROUND_PRIOR = 2.0
"""Tokens that a round of level 1 and level 2 adds."""

CAUTION = 0.8
"""Share of what may be hoped for of level 3, with level 2's and the draft's tokens, that an engine
begins with. Where that pays everybody speculates; elsewhere single requests try, within what may
be spent on finding out. With all of it a batch's first proposals are too many and too long, and
the disappointment is taken for proposals' gaining less than their acceptance (``Gain``). Looked-up
tokens cost little to try, and what may be hoped for of them is no more than was found."""

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
    draft: Rate
    """Level 2 of the draft's tokens."""
    lookup: list[Rate]
    """Level 2 of looked-up tokens, by the length of the match."""
    direct: list[Rate]
    """Level 3 of looked-up tokens that level 2 did not see."""
    direct_draft: Rate
    """Level 3 of the draft's tokens that level 2 did not see."""
    round_tokens: float = ROUND_PRIOR
    """Tokens that a round adds."""

    def add_round(self, num_tokens: int) -> None:
        self.round_tokens += (num_tokens - self.round_tokens) / 16

    @classmethod
    def hoped(cls) -> "Rates":
        """What may be hoped for."""
        return cls.of_engine(caution=1.0)

    @classmethod
    def of_engine(cls, caution: float = CAUTION) -> "Rates":
        def rate(prior: float) -> Rate:
            return Rate(prior, _ENGINE_WEIGHT, _ENGINE_MEMORY)

        return cls(
            rate(caution * LEVEL2_PRIOR),
            rate(DRAFT_PRIOR),
            [rate(prior) for prior in LOOKUP_PRIORS],
            [rate(prior * LEVEL2_PRIOR) for prior in LOOKUP_PRIORS],
            rate(caution * DRAFT_PRIOR * LEVEL2_PRIOR),
        )

    @classmethod
    def of_request(cls, engine: "Rates") -> "Rates":
        def rate(of: Rate) -> Rate:
            return Rate(of.value, _REQUEST_WEIGHT, _REQUEST_MEMORY)

        return cls(
            rate(engine.level2),
            rate(engine.draft),
            [rate(of) for of in engine.lookup],
            [rate(of) for of in engine.direct],
            rate(engine.direct_draft),
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


@dataclass
class Acceptance:
    """Everybody's estimates; a request begins with the engine's for its kind: sampled tokens are
    accepted less often than greedy ones."""

    greedy: Rates = field(default_factory=Rates.of_engine)
    sampled: Rates = field(default_factory=Rates.of_engine)
    requests: dict[str, tuple[Rates, bool]] = field(default_factory=dict)
    """Each request's, and whether it is greedy."""
    gains: dict[tuple[Route, bool], Gain] = field(default_factory=lambda: defaultdict(Gain))
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


def match_index(match_length: int) -> int:
    """Index into ``lookup`` and ``direct`` of a match of at least one token."""
    return min(match_length, LONGEST_MATCH) - 1


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
