"""What a request does in a step."""

from dataclasses import dataclass

Route = str
"""Which levels a proposal passes on its way to the full pass: ``LEVELS``, or, straight from level
1, the name of its source; ``PLAIN_ROUTE`` where there is none."""

PLAIN_ROUTE: Route = "plain"
LEVELS: Route = "levels 1 and 2"


@dataclass(frozen=True)
class Choice:
    """What a request does: a proposal of ``num_tokens`` by a route."""

    route: Route
    num_tokens: int
    confidence: int | None = None
    """Class of confidence of the source's tokens that go straight to the full pass."""


PLAIN = Choice(PLAIN_ROUTE, 0)
