"""Everything that the requests of a batch could propose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_triforce.controller.acceptance import Rates, expected_by_length
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.routes import LEVELS, PLAIN, Choice, Route, SourceTraits


@dataclass
class Candidate:
    """A request that could be speculated on in this step."""

    request_id: str
    context: int
    """Tokens."""
    most: int
    """Longest proposal that fits."""
    confidence: Mapping[str, int] = field(default_factory=dict)
    """Of the sources of level 1 that have tokens for it, by their names; those may be left out
    that always have."""
    has_seed: bool = False
    is_greedy: bool = True
    num_uncached_tokens: int = 0
    """That the draft model has to read before it can draft."""
    tokens_unselected: int = 0
    """Of context that level 2 has not looked through yet; 0 once it has."""
    num_left: int | None = None
    """Tokens that it may still emit; None where that is not known."""


# Proposals that a request is expected to make, at most, once it has made the first by a route: each
# bears that part of what the first one takes longer.
_PROPOSALS = 16


@dataclass
class Options:
    """Proposals, what they gain and what they cost beyond decoding plainly.

    Args:
        lengths: [num_reqs, num_options], tokens of the proposal.
        tokens: [num_reqs, num_options], how many of them are accepted, expected.
        seconds: [num_reqs, num_options].
        is_possible: [num_reqs, num_options], bool.
        routes: [num_options].
        confidences: of each request, by route.
        remaining_setup_s: [num_reqs, num_options], what the next proposal takes longer than
            ``seconds``, because the draft's window or level 2's selection has to be made.
        amortized_setup_s: [num_reqs, num_options], the part of that which is in ``seconds``.
        passes: [num_reqs, num_options], rounds of levels 1 and 2, or passes of the draft.
        shared_seconds: [num_reqs, num_options], the part of ``seconds`` that is the request's share
            of those.
    """

    lengths: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    is_possible: np.ndarray
    routes: list[Route] = field(default_factory=list)
    confidences: list[dict[Route, int | None]] = field(default_factory=list)
    remaining_setup_s: np.ndarray | float = 0.0
    amortized_setup_s: np.ndarray | float = 0.0
    passes: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    shared_seconds: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))

    def first_seconds(self, row: int, column: int) -> float:
        """Return the seconds of a request's next proposal, all of its setup included."""
        remaining = np.broadcast_to(self.remaining_setup_s, self.seconds.shape)
        return float(self.seconds[row, column] + remaining[row, column])

    def choice(self, row: int, column: int) -> Choice:
        if column < 0:
            return PLAIN
        route, length = self.routes[column], int(self.lengths[row, column])
        return Choice(route, length, self.confidences[row].get(route))


def build_options(
    model: CostModel,
    candidates: Sequence[Candidate],
    rates: Sequence[Rates],
    gains: Sequence[dict[Route, float]],
    longest: Sequence[int],
    lengths: Sequence[int],
    slope: float,
    company: float,
    round_seconds: float,
    draft_seconds: float,
    sources: Sequence[SourceTraits],
    has_levels: bool,
    round_passes: int = 0,
) -> Options:
    """Every candidate's proposals of ``lengths`` and of its longest possible one, by levels 1 and
    2 and straight from each source.

    Args:
        rates: of each candidate.
        gains: of each candidate and route, tokens that were gained over those expected.
        longest: of each candidate the longest proposal it may make, 0 for none.
        slope: seconds that each token more adds to the full pass, attention apart.
        company: factor on what further tokens' attention takes, where so many requests propose.
        round_seconds: of a round of level 1 and level 2, a request's share.
        draft_seconds: of a pass of the draft, a request's share.
        sources: whose tokens may go straight to the full pass.
        has_levels: whether tokens may go through level 2.
        round_passes: of the draft in a round, where rounds are made as a whole, needed or not; 0:
            they end with the tokens.
    """
    most = np.array(longest)[:, None]
    shape = (len(candidates), len(lengths) + 1)
    each = np.empty(shape, dtype=np.int64)
    each[:, :-1], each[:, -1:] = lengths, most
    fits = (each > 0) & (each <= most)
    places = each * fits
    rows = np.arange(len(candidates))[:, None]

    attention = model.attention_table([c.context for c in candidates], max(longest) + 1)
    per_token = np.array([slope + model.draft_seconds(c.is_greedy) for c in candidates])[:, None]
    full = per_token * places + company * (attention[rows, places + 1] - attention[:, 1:2])

    window = np.array([model.reading_window(c.num_uncached_tokens) for c in candidates])[:, None]
    selecting = np.array([model.first_selection(c.tokens_unselected) for c in candidates])[:, None]

    confidences: list[dict[Route, int | None]] = [
        {source.name: source.confidence(c.confidence) for source in sources} for c in candidates
    ]
    takes_passes = {source.name: source.takes_passes for source in sources}
    routes = [*([LEVELS] if has_levels else []), *takes_passes]
    tokens, seconds, possible, first = [], [], [], []
    passes, shared = [], []
    for route in routes:
        found = [_rate(route, r, known) for r, known in zip(rates, confidences)]
        by_length = expected_by_length(np.array(found)[:, None], max(longest))
        gained = np.array([gain.get(route, 1.0) for gain in gains])[:, None]
        tokens.append(gained * by_length[rows, places])
        is_possible = fits
        if route == LEVELS:
            rounds = np.array([1 / max(1.0, r.round_tokens) for r in rates])[:, None] * places
            if round_passes:
                rounds = np.maximum(rounds.round(), 1)
            passes.append(rounds)
            shared.append(rounds * round_seconds)
            seconds.append(full + model.begin_seconds + shared[-1])
            first.append(window + selecting)
        else:
            drafted = places
            if round_passes:
                drafted = -(-places // round_passes) * round_passes
            passes.append(drafted * takes_passes[route])
            shared.append(passes[-1] * draft_seconds)
            seconds.append(full + shared[-1])
            first.append(window * takes_passes[route])
            has_tokens = [known[route] is not None for known in confidences]
            is_possible = fits & np.array(has_tokens)[:, None]
        possible.append(is_possible)
    more = np.concatenate([np.broadcast_to(seconds_, shape) for seconds_ in first], axis=1)
    gained = np.concatenate(tokens, axis=1)
    left = [np.inf if c.num_left is None else c.num_left for c in candidates]
    proposals = np.clip(np.array(left)[:, None] / (1 + gained), 1, _PROPOSALS)
    return Options(
        np.concatenate([places] * len(routes), axis=1),
        gained,
        np.concatenate(seconds, axis=1) + more / proposals,
        np.concatenate(possible, axis=1),
        [route for route in routes for _ in range(shape[1])],
        confidences,
        more * (1 - 1 / proposals),
        more / proposals,
        np.concatenate(passes, axis=1),
        np.concatenate(shared, axis=1),
    )


def _rate(route: Route, rates: Rates, confidences: Mapping[Route, int | None]) -> float:
    """Level 3's acceptance of a token by this route."""
    if route == LEVELS:
        return rates.level2.value
    confidence = confidences[route]
    return 0.0 if confidence is None else rates.of(route, False, confidence).value
