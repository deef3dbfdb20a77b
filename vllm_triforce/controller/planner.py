"""Plan of a batch: which requests propose how much, so that everybody's tokens come fastest."""

from dataclasses import dataclass, replace

import numpy as np

from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.options import Options
from vllm_triforce.controller.routes import HIERARCHICAL

# Step times that are tried first, between the plain and the longest step on a scale of ratios.
_STARTS = np.linspace(0, 1, 12)
# Improvements from the best of these.
_MAX_MOVES = 4


@dataclass
class StepCosts:
    """Cost of a batch's step, beside its proposals.

    Args:
        plain_s: seconds of a plain step.
        speculating_s: seconds that verifying any drafts adds.
        num_plain: requests of the batch that decode plainly in any case.
        drafts_per_round: passes of the draft in a round of levels 1 and 2.
    """

    model: CostModel
    plain_s: float
    speculating_s: float
    num_plain: int
    drafts_per_round: int


@dataclass
class Plan:
    """Proposals of a batch.

    Args:
        options: column of each request's option, -1 for plain decoding; [num_reqs].
        speedup: over plain decoding, the geometric mean of the requests' expected speeds.
        seconds: of the step.
    """

    options: np.ndarray
    speedup: float
    seconds: float

    @property
    def is_plain(self) -> bool:
        return bool((self.options < 0).all())


def plan(
    options: Options,
    plain_s: float,
    speculating_s: float = 0.0,
    num_plain: int = 0,
    margin: float = 0.0,
) -> Plan:
    """Maximize the geometric mean of the requests' expected speeds.

    A plain step gives each request a token and takes ``plain_s``. Options add tokens ``E`` and
    seconds ``C``, and the first one adds ``speculating_s`` once. So request i's speed is
    ``(1 + E_i) / T`` with ``T = plain + speculating + sum C``: everybody waits for everybody's
    proposals. By the sum of speeds one well predicted request could double the others' time
    between tokens; the geometric mean weighs each gain and loss by its share.

    ``sum log(1 + E_i) - n log T`` is convex in ``T``, so its tangent at any ``T0`` lies below it.
    The best set of options is therefore the best one at its own tangent, where each request
    decides by itself: it takes the option with the largest ``log(1 + E) - (n / T0) * C``. Sets are
    made for several ``T0``; from the best, ``T0`` moves to that set's ``T`` while this improves.

    Args:
        num_plain: further requests, which decode plainly.
        margin: relative gain below which nothing is proposed.
    """
    num_rows = len(options.tokens)
    num_reqs = num_rows + num_plain
    plain = Plan(np.full(num_rows, -1), 1.0, plain_s)
    if not options.is_possible.any():
        return plain
    logs = np.where(options.is_possible, np.log1p(options.tokens), -np.inf)
    rows = np.arange(num_rows)
    base_s = plain_s + speculating_s

    def judge(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds and log speedups of sets, [..., num_rows]."""
        is_taken = columns >= 0
        seconds = base_s + np.where(is_taken, options.seconds[rows, columns], 0).sum(-1)
        gained = np.where(is_taken, logs[rows, columns], 0).sum(-1)
        return seconds, gained - num_reqs * np.log(seconds / plain_s)

    longest_s = base_s + np.where(options.is_possible, options.seconds, 0).max(1).sum()
    prices = num_reqs / plain_s * (plain_s / longest_s) ** _STARTS
    sets = _best_columns(logs, options, prices[:, None, None])
    seconds, values = judge(sets)
    best = int(values.argmax())
    columns, step_s, value = sets[best], seconds[best], values[best]
    for _ in range(_MAX_MOVES):
        moved = _best_columns(logs, options, num_reqs / step_s)
        moved_s, moved_value = judge(moved)
        if moved_value <= value + 1e-9:
            break
        columns, step_s, value = moved, moved_s, moved_value
    speedup = float(np.exp(value / num_reqs))
    if speedup <= 1 + margin or (columns < 0).all():
        return plain
    return Plan(columns, speedup, float(step_s))


def _best_columns(logs: np.ndarray, options: Options, price) -> np.ndarray:
    """Take each request's option with the largest ``log - price * seconds``, -1 below 0.

    Args:
        logs: [num_reqs, num_options], -infinity for an impossible option.
        price: of a second; a number, or [..., 1, 1].
    """
    gains = logs - price * options.seconds
    return np.where(gains.max(-1) > 0, gains.argmax(-1), -1)


def best_alone(options: Options, share_s: float) -> np.ndarray:
    """Return each request's fastest option if a plain step takes ``share_s`` of it; -1 for none."""
    speeds = (1 + options.tokens) / (share_s + options.seconds)
    speeds = np.where(options.is_possible, speeds, -np.inf)
    return np.where(np.isfinite(speeds.max(axis=1)), speeds.argmax(axis=1), -1)


def plan_by_routes(options: Options, costs: StepCosts) -> Plan:
    """Return the best of several plans, priced with whole passes.

    In one plan each request takes its best route; in one plan for each route that takes passes,
    nobody takes another such route. Options are priced as if all requests shared a route's passes.
    Two routes side by side take the passes of both: one of them for all is often better.
    """
    margin = costs.model.error
    arguments = costs.plain_s, costs.speculating_s, costs.num_plain, margin
    plans = [plan(options, *arguments)]
    routes = np.array(options.routes)
    with_passes = [r for r in dict.fromkeys(options.routes) if options.passes[:, routes == r].any()]
    planned_routes = {options.routes[c] for c in plans[0].options if c >= 0}
    if len(with_passes) > 1 and len(planned_routes) > 1:
        for route in with_passes:
            others = [r for r in with_passes if r != route]
            is_possible = options.is_possible & ~np.isin(routes, others)
            plans.append(plan(replace(options, is_possible=is_possible), *arguments))
    num_reqs = len(options.tokens) + costs.num_plain
    best = Plan(np.full(len(options.tokens), -1), 1.0, costs.plain_s)
    for candidate in plans:
        if candidate.is_plain:
            continue
        columns = candidate.options
        seconds = candidate.seconds + unshared_seconds(options, columns, costs)
        rows = np.flatnonzero(columns >= 0)
        gained = np.log1p(options.tokens[rows, columns[rows]]).sum()
        speedup = float(np.exp(gained / num_reqs) * costs.plain_s / seconds)
        if speedup > max(1 + margin, best.speedup):
            best = Plan(columns, speedup, seconds)
    return best


def unshared_seconds(options: Options, columns: np.ndarray, costs: StepCosts) -> float:
    """Return the seconds of a plan's passes beyond its requests' shares of them.

    A route makes the passes of the request that needs most, for all requests that take it.

    Args:
        columns: of ``options``, -1 for none; [num_reqs].
    """
    rows = np.flatnonzero(columns >= 0)
    planned = columns[rows]
    seconds = -float(options.shared_s[rows, planned].sum())
    by_route: dict[str, list[float]] = {}
    for row, column in zip(rows, planned):
        if passes := float(options.passes[row, column]):
            by_route.setdefault(options.routes[column], []).append(passes)
    for route, passes_of_reqs in by_route.items():
        count = len(passes_of_reqs)
        pass_s = costs.model.draft(count)
        if route == HIERARCHICAL:
            pass_s = costs.model.round_seconds(count, costs.drafts_per_round)
        seconds += max(passes_of_reqs) * pass_s
    return seconds
