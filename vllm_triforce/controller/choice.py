"""What a request does in a step."""

from dataclasses import dataclass
from enum import Enum


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
