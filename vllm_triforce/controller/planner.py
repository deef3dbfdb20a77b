"""Which requests propose how much in a step, so that everybody's tokens come fastest.

Plans where requests that go by the same route make their passes together (Model Runner V2).
"""

from dataclasses import dataclass, replace

import numpy as np

from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.options import Options
from vllm_triforce.controller.routes import LEVELS

# Where between the shortest and the longest step, on a scale of ratios, the best is looked for.
_STARTS = np.linspace(0, 1, 12)


@dataclass
class Plan:
    """What is best for a batch.

    Args:
        options: [num_reqs], of each request the column of its option, -1 for decoding plainly.
        speedup: over decoding plainly, the geometric mean of what is expected of the requests.
        seconds: that the step takes with it.
    """

    options: np.ndarray
    speedup: float
    seconds: float

    @property
    def is_plain(self) -> bool:
        return bool((self.options < 0).all())


def plan(
    options: Options,
    plain_seconds: float,
    speculating_seconds: float = 0.0,
    num_plain: int = 0,
    margin: float = 0.0,
) -> Plan:
    """Maximises the geometric mean of the requests' expected speeds.

    A step gives each request a token and takes ``plain_seconds``. Options add tokens ``E`` and
    seconds ``C``, and the first one adds ``speculating_seconds`` once, so request i's speed is
    ``(1 + E_i) / T`` with ``T = plain + speculating + sum C``: everybody waits for everybody's
    proposals. The sum of all speeds would let a well predicted request double the others' time
    between tokens; the geometric mean weighs what each gains and loses by its share.

    ``sum log(1 + E_i) - n log T`` is convex in ``T``, so its tangent at any ``T0`` lies below it,
    and the best set of options is also the best one at its own tangent, where each request
    decides by itself: it takes the option with the largest ``log(1 + E) - (n / T0) * C``. So
    these sets are made for several ``T0``, and from the best of them ``T0`` is moved to what it
    comes to, which can only rise, until it no longer does.

    Args:
        num_plain: further requests, which decode plainly whatever is chosen.
        margin: relative gain below which nothing is proposed; and, of a request's proposals whose
            speeds differ by less than half of it, the shortest is taken: it risks less, and tokens
            come more evenly.
    """
    num_rows = len(options.tokens)
    num_reqs = num_rows + num_plain
    nothing = Plan(np.full(num_rows, -1), 1.0, plain_seconds)
    if not options.is_possible.any():
        return nothing
    logs = np.where(options.is_possible, np.log1p(options.tokens), -np.inf)
    rows = np.arange(num_rows)
    base = plain_seconds + speculating_seconds

    def judged(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of sets [..., num_rows] the step's seconds and the objective over plain decoding's."""
        is_taken = columns >= 0
        seconds = base + np.where(is_taken, options.seconds[rows, columns], 0).sum(-1)
        gained = np.where(is_taken, logs[rows, columns], 0).sum(-1)
        return seconds, gained - num_reqs * np.log(seconds / plain_seconds)

    longest = base + np.where(options.is_possible, options.seconds, 0).max(1).sum()
    prices = num_reqs / plain_seconds * (plain_seconds / longest) ** _STARTS
    sets = _best_columns(logs, options, prices[:, None, None])
    seconds, values = judged(sets)
    best = int(values.argmax())
    columns, second, value = sets[best], seconds[best], values[best]
    for _ in range(4):
        moved = _best_columns(logs, options, num_reqs / second)
        moved_second, moved_value = judged(moved)
        if moved_value <= value + 1e-9:
            break
        columns, second, value = moved, moved_second, moved_value
    if margin:
        columns = _shortest(logs, options, num_reqs / second, columns, margin)
        second, value = judged(columns)
    speedup = float(np.exp(value / num_reqs))
    if speedup <= 1 + margin or (columns < 0).all():
        return nothing
    return Plan(columns, speedup, float(second))


def _best_columns(logs: np.ndarray, options: Options, price) -> np.ndarray:
    """Of each request the option with the largest ``log - price * seconds``, -1 where none is
    above decoding plainly.

    Args:
        logs: [num_reqs, num_options], -infinity where an option is not possible.
        price: of a second; a number, or an array [..., 1, 1].
    """
    gains = logs - price * options.seconds
    return np.where(gains.max(-1) > 0, gains.argmax(-1), -1)


def _shortest(logs, options: Options, price: float, columns: np.ndarray, margin: float):
    """Instead of each request's option, the shortest of those that gain nearly as much."""
    gains = logs - price * options.seconds
    is_good = gains >= gains.max(1, keepdims=True) - np.log1p(margin) / 2
    lengths = np.where(is_good, options.lengths, np.inf)
    is_shortest = is_good & (lengths == lengths.min(1, keepdims=True))
    # Of equally long ones, by other routes, the one that gains most.
    found = np.where(is_shortest, gains, -np.inf).argmax(1)
    return np.where(columns < 0, -1, found)


def best_alone(options: Options, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each request by itself, if a plain step takes ``share`` seconds of it.

    Returns:
        Columns, [num_reqs], and tokens per second, [num_reqs]; -infinity where none is possible.
    """
    rates = (1 + options.tokens) / (share + options.seconds)
    rates = np.where(options.is_possible, rates, -np.inf)
    return rates.argmax(axis=1), rates.max(axis=1)


def plan_by_routes(
    model: CostModel,
    options: Options,
    plain_seconds: float,
    speculating_seconds: float,
    num_plain: int,
    round_drafts: int,
) -> Plan:
    """The best of several plans: one in which each request goes by the route that is best for it,
    and one for each route that takes passes, in which nobody goes by another that does.

    Options are priced as if a route's passes were shared by all. Two routes side by side take the
    passes of both, each for a part of the requests: often one of them for all is better.

    Args:
        options: with each request's share of passes that all share.
        round_drafts: passes of the draft in a round.
    """
    arguments = plain_seconds, speculating_seconds, num_plain, model.error
    plans = [plan(options, *arguments)]
    routes = np.array(options.routes)
    taking = [r for r in dict.fromkeys(options.routes) if options.passes[:, routes == r].any()]
    if len(taking) > 1 and len({options.routes[c] for c in plans[0].options if c >= 0}) > 1:
        for route in taking:
            others = [r for r in taking if r != route]
            is_possible = options.is_possible & ~np.isin(routes, others)
            plans.append(plan(replace(options, is_possible=is_possible), *arguments))
    num_reqs = len(options.tokens) + num_plain
    best: Plan | None = None
    for its in plans:
        if its.is_plain:
            continue
        seconds = its.seconds + seconds_of_batch(model, options, its.options, round_drafts)
        rows = np.flatnonzero(its.options >= 0)
        gained = np.log1p(options.tokens[rows, its.options[rows]]).sum()
        speedup = float(np.exp(gained / num_reqs) * plain_seconds / seconds)
        if speedup > 1 + model.error and (best is None or speedup > best.speedup):
            best = Plan(its.options, speedup, seconds)
    return best or Plan(np.full(num_reqs - num_plain, -1), 1.0, plain_seconds)


def seconds_of_batch(
    model: CostModel, options: Options, columns: np.ndarray, round_drafts: int
) -> float:
    """What the passes of a plan take beyond the shares that its requests are charged: each route
    makes as many as the request that needs the most, for those that go by it.

    Args:
        columns: [num_reqs], of ``options``; -1 for none.
    """
    rows = np.flatnonzero(columns >= 0)
    taken = columns[rows]
    seconds = -float(options.shared_seconds[rows, taken].sum())
    by_route: dict[str, list[float]] = {}
    for row, column in zip(rows, taken):
        if passes := float(options.passes[row, column]):
            by_route.setdefault(options.routes[column], []).append(passes)
    for route, of_requests in by_route.items():
        count = len(of_requests)
        each = model.round_seconds(count, round_drafts) if route == LEVELS else model.draft(count)
        seconds += max(of_requests) * each
    return seconds
