"""Options of a batch: every proposal that its requests could make, as arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_triforce.controller.acceptance import Rates, expected_by_length
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.routes import (
    HIERARCHICAL,
    PLAIN,
    Choice,
    MatchClass,
    Route,
    SourceTraits,
)


@dataclass
class Candidate:
    """A request that could be speculated on in this step."""

    request_id: str
    context: int
    """Tokens."""
    max_tokens: int
    """Longest proposal that fits."""
    match_classes: Mapping[str, MatchClass | None] = field(default_factory=dict)
    """Match class by source, None for no tokens; sources that always have some may be missing."""
    has_seed: bool = False
    is_greedy: bool = True


@dataclass
class Options:
    """Proposals with their expected tokens, and their seconds beyond a plain step.

    Arrays are [num_reqs, num_options].
    """

    routes: list[Route]  # [num_options]
    match_classes: list[dict[Route, MatchClass | None]]  # by route, for each request
    lengths: np.ndarray  # tokens of the proposal
    tokens: np.ndarray  # expected accepted ones
    seconds: np.ndarray  # passes of a route are shared by all requests
    is_possible: np.ndarray  # bool
    num_rounds: np.ndarray
    passes: np.ndarray  # rounds of levels 1 and 2, or passes of the draft
    shared_s: np.ndarray  # the request's share of these passes, part of ``seconds``

    def choice(self, row: int, column: int) -> Choice:
        """Return a column's choice, or plain decoding for -1."""
        if column < 0:
            return PLAIN
        route, length = self.routes[column], int(self.lengths[row, column])
        num_rounds = int(self.num_rounds[row, column])
        return Choice(route, length, num_rounds, self.match_classes[row].get(route))


def build_options(
    model: CostModel,
    candidates: Sequence[Candidate],
    rates: Sequence[Rates],
    lengths: np.ndarray,
    routes: Mapping[Route, SourceTraits | None],
    num_plain: int,
    drafts_per_round: int = 0,
) -> Options:
    """Build the options of every route and length.

    Args:
        rates: acceptance, for each candidate.
        lengths: [num_reqs, num_lengths], 0 for a proposal that does not fit.
        routes: in the order of the options' columns; None for ``HIERARCHICAL``.
        num_plain: further requests of the step.
        drafts_per_round: passes of the draft in a round that is made as a whole; 0 where it ends
            with a token.
    """
    count = len(candidates)
    by_length = model.verification(
        [c.context for c in candidates],
        [c.is_greedy for c in candidates],
        count + num_plain,
        int(lengths.max(initial=0)),
    )
    verify_s = np.take_along_axis(by_length, lengths, axis=1)
    round_s = _column(model.round_seconds(count, c.context) / count for c in candidates)
    draft_s = model.draft(count) / count
    match_classes = [
        {n: None if s is None else s.match_class(c.match_classes) for n, s in routes.items()}
        for c in candidates
    ]
    parts = []
    for route, source in routes.items():
        tokens = _expected_tokens(route, rates, match_classes, lengths)
        is_possible = lengths > 0
        num_rounds = passes = _num_rounds(source, rates, lengths, drafts_per_round)
        if source is not None:
            passes = num_rounds * float(source.takes_passes * max(1, drafts_per_round))
            is_possible = is_possible & _column(c[route] is not None for c in match_classes)
        shared_s = passes * (round_s if source is None else draft_s)
        seconds = verify_s + shared_s
        parts.append((lengths, tokens, seconds, is_possible, num_rounds, passes, shared_s))
    columns = [route for route in routes for _ in range(lengths.shape[1])]
    return Options(columns, match_classes, *(np.concatenate(part, axis=1) for part in zip(*parts)))


def _column(values: Iterable) -> np.ndarray:  # [num_reqs, 1]
    return np.array(list(values))[:, None]


def _expected_tokens(
    route: Route,
    rates: Sequence[Rates],
    match_classes: Sequence[Mapping[Route, MatchClass | None]],
    lengths: np.ndarray,  # [num_reqs, num_lengths]
) -> np.ndarray:  # [num_reqs, num_lengths], float
    """Return the expected accepted tokens of proposals by a route."""
    max_tokens = int(lengths.max(initial=0))

    def acceptance(of_request: Rates, match_class: MatchClass | None) -> list[float]:
        if route == HIERARCHICAL:
            return [of_request.level2.value] * max_tokens
        if match_class is None:
            return [0.0] * max_tokens
        return of_request.by_place(route, False, match_class, max_tokens)

    by_place = [acceptance(each, classes[route]) for each, classes in zip(rates, match_classes)]
    return expected_by_length(np.array(by_place))[np.arange(len(rates))[:, None], lengths]


def _num_rounds(
    source: SourceTraits | None,
    rates: Sequence[Rates],
    lengths: np.ndarray,  # [num_reqs, num_lengths]
    drafts_per_round: int,
) -> np.ndarray:  # [num_reqs, num_lengths], float
    """Count the rounds of proposals through the levels, or from a source, on average."""
    if source is not None:
        return -(-lengths // max(1, drafts_per_round))
    num_rounds = lengths / np.array([max(1.0, r.round_tokens) for r in rates])[:, None]
    return np.maximum(num_rounds.round(), 1) if drafts_per_round else num_rounds
