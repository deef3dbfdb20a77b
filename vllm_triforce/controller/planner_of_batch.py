"""Plans where requests that go by the same route make their passes together (Model Runner V2)."""

from dataclasses import replace

import numpy as np

from vllm_triforce.controller.choice import LEVELS
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.options import Options
from vllm_triforce.controller.planner import Plan, plan


def plan_by_routes(
    model: CostModel,
    options: Options,
    plain_seconds: float,
    speculating_seconds: float,
    num_plain: int,
    round_drafts: int,
) -> tuple[Plan, np.ndarray]:
    """The best of several plans: one in which each request goes by the route that is best for it,
    and one for each route that takes passes, in which nobody goes by another that does.

    Options are priced as if a route's passes were shared by all. Two routes side by side take the
    passes of both, each for a part of the requests: often one of them for all is better.

    Args:
        options: with each request's share of passes that all share.
        round_drafts: passes of the draft in a round.

    Returns:
        The plan; and what each request would do if passes were shared as ``options`` suppose,
        [num_reqs].
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
    return best or Plan(np.full(num_reqs - num_plain, -1), 1.0, plain_seconds), plans[0].options


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
