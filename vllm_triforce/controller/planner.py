"""Which requests propose how much in a step, so that tokens per second are most."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_triforce.controller.acceptance import Rates, expected_accepted, match_index
from vllm_triforce.controller.cost_model import CostModel, interpolate


class Route(Enum):
    """Which levels a proposal passes on its way to the full pass."""

    PLAIN = "plain"
    LEVELS = "levels 1 and 2"
    LOOKUP = "prompt lookup"
    DRAFT = "draft"


@dataclass(frozen=True)
class Choice:
    """What a request does: a proposal of ``num_tokens`` by a route."""

    route: Route
    num_tokens: int
    match_length: int = 0


PLAIN = Choice(Route.PLAIN, 0)


@dataclass
class Option:
    """A choice, what it gains and what it costs beyond decoding plainly."""

    choice: Choice
    tokens: float
    seconds: float


def plan(
    requests: list[list[Option]],  # of each request
    plain_seconds: float,
    margin: float = 0.0,
) -> list[Choice]:
    """Maximises expected tokens per second of the whole step.

    A step emits a token for each request and takes ``plain_seconds``. Options add tokens ``E`` and
    seconds ``C``; the best sum of ratios ``(n + sum E) / (plain + sum C)`` is found by
    Dinkelbach's method: at the present rate ``r`` each request takes the option with the largest
    ``E - r * C``, which gives a better rate, until it no longer rises. So a request with nothing
    to gain decodes plainly whatever the others do.

    Args:
        margin: relative gain over plain decoding below which nothing is proposed; and, of
            proposals whose gains differ by less, the shortest is taken: it risks less, and tokens
            come more evenly.
    """
    plain_rate = rate = (1 + margin) * len(requests) / plain_seconds
    best: list[Choice] = [PLAIN] * len(requests)
    for _ in range(8):
        chosen = []
        for options in requests:
            chosen.append(_best(options, rate, margin))
        taken = [option for option in chosen if option is not None]
        seconds = plain_seconds + sum(option.seconds for option in taken)
        found = (len(requests) + sum(option.tokens for option in taken)) / seconds
        if not taken or found <= rate * (1 + 1e-6):
            break
        rate = found
        best = [PLAIN if option is None else option.choice for option in chosen]
    return best if rate > plain_rate else [PLAIN] * len(requests)


def _best(options: list[Option], rate: float, margin: float) -> Option | None:
    """The option with the largest ``tokens - rate * seconds``, or a shorter one that is nearly as
    good; None where nothing is gained."""
    gains = [option.tokens - rate * option.seconds for option in options]
    most = max(gains, default=0.0)
    if most <= 0:
        return None
    good = [o for o, gain in zip(options, gains) if gain >= (1 - margin) * most]
    return min(good, key=lambda o: o.choice.num_tokens)


def best_gamma(
    model: CostModel, rate: float, num_rows: int, most: int, is_greedy: bool = True
) -> tuple[int, float]:
    """How many tokens the draft is worth asking for, for a pass of level 2.

    Returns:
        The number, 0 where level 2 is better off alone, and tokens per second of such rounds.
    """
    best, best_speed = 0, 1 / _round(model, num_rows, 0, is_greedy)
    for gamma in range(1, most + 1):
        seconds = _round(model, num_rows, gamma, is_greedy) + gamma * model.draft(num_rows)
        speed = (1 + expected_accepted(rate, gamma)) / seconds
        if speed > best_speed:
            best, best_speed = gamma, speed
    return best, best_speed


def best_lookup(
    model: CostModel, rate: float, num_rows: int, most: int, is_greedy: bool = True
) -> tuple[int, float]:
    """How many looked-up tokens a pass of level 2 should test; as ``best_gamma``."""
    best, best_speed = 0, 1 / _round(model, num_rows, 0, is_greedy)
    for count in range(1, most + 1):
        speed = (1 + expected_accepted(rate, count)) / _round(model, num_rows, count, is_greedy)
        if speed > best_speed:
            best, best_speed = count, speed
    return best, best_speed


def _round(model: CostModel, num_rows: int, num_drafts: int, is_greedy: bool) -> float:
    """Seconds of level 2's pass and test of so many drafts a request."""
    tests = model.test_seconds(num_rows * (num_drafts + 1), is_greedy)
    return model.level2(num_rows, num_drafts + 1) + tests


def options(
    model: CostModel,
    rates: Rates,
    context: int,
    lengths: Sequence[int],
    num_rows: int,
    round_seconds: float,
    match_length: int,
    slope: float,
    route_draft: bool = False,
    is_greedy: bool = True,
) -> list[Option]:
    """Everything that a request could propose.

    Args:
        lengths: of proposals to consider, in tokens.
        round_seconds: of a round of level 1 and level 2, this request's share.
        match_length: of the n-gram that prompt lookup found, 0 for none.
        slope: seconds that each token more adds to the full pass, attention apart.
    """
    found = []
    attention = model.attention_by_tokens(context)
    plain_attention = interpolate(attention, 1)
    slope += model.draft_seconds(is_greedy)
    for length in lengths:
        full = slope * length + interpolate(attention, length + 1) - plain_attention
        tokens = expected_accepted(rates.level2.value, length)
        rounds = length / max(1.0, rates.round_tokens)
        seconds = full + model.begin_seconds + rounds * round_seconds
        found.append(Option(Choice(Route.LEVELS, length), tokens, seconds))
        if match_length:
            rate = rates.direct[match_index(match_length)].value
            choice = Choice(Route.LOOKUP, length, match_length)
            found.append(Option(choice, expected_accepted(rate, length), full))
        if route_draft:
            rate = rates.direct_draft.value
            seconds = full + length * model.draft(num_rows) / num_rows
            choice = Choice(Route.DRAFT, length)
            found.append(Option(choice, expected_accepted(rate, length), seconds))
    return found
