"""What a request does in a step.

What decisions need to know of a source of level 1's tokens.
"""

from collections.abc import Mapping
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


@dataclass(frozen=True)
class SourceTraits:
    """
    Args:
        name: by which choices name it.
        hopes: shares of its tokens that level 2 may be hoped to accept, by class of confidence.
        takes_passes: whether each token takes a pass of the draft model, and whether it therefore
            always has tokens; else they take no time, and are there where there is a match.
    """

    name: str
    hopes: tuple[float, ...]
    takes_passes: bool = False

    def __post_init__(self) -> None:
        if not self.hopes or not all(0 <= hope <= 1 for hope in self.hopes):
            raise ValueError(
                f"draft source {self.name!r} has hopes={self.hopes!r}; give a share from 0 to 1 "
                "for each class of confidence, one at least"
            )

    def confidence(self, found: Mapping[str, int]) -> int | None:
        """Class of its tokens for a request, an index into ``hopes``; None where it has none.

        Args:
            found: of the sources that have tokens, those left out that always have.
        """
        given = found.get(self.name, 0 if self.takes_passes else None)
        return None if given is None else max(0, min(given, len(self.hopes) - 1))
