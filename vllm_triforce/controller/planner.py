"""Plan of a batch: which requests propose how much, so that everybody's tokens come fastest.

Options are all proposals that the requests could make, as arrays; the plan chooses among them.

A plain step gives each of ``n`` requests a token and takes ``plain``. Request i's proposal adds
``E_i`` expected tokens and ``C_i`` seconds, and all wait for all: request i's speed is
``(1 + E_i) / T`` with ``T = plain + speculating + sum C``. The plan maximizes the geometric mean of
the speeds. By their sum, one well predicted request could double the others' time between tokens;
the geometric mean weighs each gain and loss by its share. No request may become slower than plain
decoding by more than ``max_slowdown``.

``sum log(1 + E_i) - n log T`` is convex in ``T``, so its tangent at any ``T0`` lies below it. The
best set of proposals is therefore the best one at its own tangent, where each request decides by
itself: it takes the proposal with the largest ``log(1 + E) - (n / T0) * C``. Sets are made for many
prices of a second, and judged with whole passes: a route makes the passes of the request that needs
most, for all requests that take it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_triforce.controller.acceptance import Rates, expected_by_length
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.routes import (
    HIERARCHICAL,
    PLAIN,
    Candidate,
    Choice,
    MatchClass,
    Route,
    SourceTraits,
)

# Prices of a second, on a scale of ratios: 1 of the longest step, 0 of a plain one. Negative ones
# make the short steps that a limit on slowdown needs.
_PRICES = np.linspace(-1, 1, 25)


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


@dataclass
class StepCosts:
    """Cost of a batch's step, beside its proposals."""

    model: CostModel
    plain_s: float  # of a plain step
    speculating_s: float  # that verifying any drafts adds
    num_plain: int  # requests of the batch that decode plainly in any case
    context: float  # mean tokens of the requests that could propose
    is_limited: np.ndarray  # True for those that may lose ``max_slowdown`` at most; [num_reqs]


@dataclass
class Plan:
    """Proposals of a batch."""

    options: np.ndarray  # column of each request's option, -1 for plain decoding; [num_reqs]
    speedup: float  # over plain decoding, the geometric mean of the requests' expected speeds
    seconds: float  # of the step

    @property
    def is_plain(self) -> bool:
        return bool((self.options < 0).all())


def plan(options: Options, costs: StepCosts, max_slowdown: float = 1.0) -> Plan:
    """Return the best plan, the plain one where none gains more than predictions are wrong by."""
    rows = np.arange(len(options.tokens))
    num_reqs = len(rows) + costs.num_plain
    plain = Plan(np.full(len(rows), -1), 1.0, costs.plain_s)
    if not options.is_possible.any():
        return plain
    logs = np.log1p(options.tokens)
    base_s = costs.plain_s + costs.speculating_s
    longest_s = base_s + np.where(options.is_possible, options.seconds, 0).max(1).sum()
    prices = num_reqs / costs.plain_s * (costs.plain_s / longest_s) ** _PRICES
    best_columns = []
    for mask in _route_masks(options):
        gains = np.where(mask, logs, -np.inf) - prices[:, None, None] * options.seconds
        best_columns.append(np.where(gains.max(-1) > 0, gains.argmax(-1), -1))
    sets = np.concatenate(best_columns)  # a set for each mask and price, [num_sets, num_reqs]
    is_taken = sets >= 0
    gained = np.where(is_taken, logs[rows, sets], 0)
    seconds = base_s + np.where(is_taken, options.seconds[rows, sets], 0).sum(-1)
    seconds = seconds + unshared_seconds(options, sets, costs)
    values = gained.sum(-1) - num_reqs * np.log(seconds / costs.plain_s)
    least = np.where(costs.is_limited, gained, np.inf).min(-1)
    if costs.num_plain:
        least = np.zeros(len(sets))
    is_fair = costs.plain_s * np.exp(least) >= (1 - max_slowdown) * seconds
    values = np.where(is_taken.any(-1) & is_fair, values, -np.inf)
    best = int(values.argmax())
    speedup = float(np.exp(values[best] / num_reqs))
    if speedup <= 1 + costs.model.error:
        return plain
    return Plan(sets[best], speedup, float(seconds[best]))


def _routes_with_passes(options: Options) -> list[str]:
    routes = np.array(options.routes)
    return [r for r in dict.fromkeys(options.routes) if options.passes[:, routes == r].any()]


def _route_masks(options: Options) -> Iterator[np.ndarray]:  # [num_reqs, num_options], bool
    """Yield all options, and those without all but one of the routes that take passes.

    Two such routes side by side take the passes of both: one of them for all is often better.
    """
    yield options.is_possible
    routes, with_passes = np.array(options.routes), _routes_with_passes(options)
    # One request takes one route.
    for route in with_passes if len(with_passes) > 1 and len(options.tokens) > 1 else ():
        others = [r for r in with_passes if r != route]
        yield options.is_possible & ~np.isin(routes, others)


def best_alone(options: Options, share_s: float) -> np.ndarray:
    """Return each request's fastest option if a plain step takes ``share_s`` of it; -1 for none."""
    speeds = (1 + options.tokens) / (share_s + options.seconds)
    speeds = np.where(options.is_possible, speeds, -np.inf)
    return np.where(np.isfinite(speeds.max(axis=1)), speeds.argmax(axis=1), -1)


def unshared_seconds(
    options: Options,
    columns: np.ndarray,  # of ``options``, -1 for none; [..., num_reqs]
    costs: StepCosts,
) -> np.ndarray:  # [...]
    """Return the seconds of plans' passes beyond their requests' shares of them."""
    rows, is_taken = np.arange(len(options.tokens)), columns >= 0
    if len(rows) == 1:
        return np.zeros(columns.shape[:-1])  # a request alone pays for all of its passes
    passes = np.where(is_taken, options.passes[rows, columns], 0)
    seconds = -np.where(is_taken, options.shared_s[rows, columns], 0).sum(-1)
    routes = np.array(options.routes)
    for route in _routes_with_passes(options):
        route_passes = np.where(routes[columns] == route, passes, 0)
        counts = (route_passes > 0).sum(-1)
        pass_s = np.zeros(len(rows) + 1)
        for count in np.unique(counts[counts > 0]):
            pass_s[count] = (
                costs.model.round_seconds(int(count), costs.context)
                if route == HIERARCHICAL
                else costs.model.draft(int(count))
            )
        seconds = seconds + route_passes.max(-1) * pass_s[counts]
    return seconds
