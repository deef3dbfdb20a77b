"""What decisions need to know of a source of level 1's tokens."""

from collections.abc import Mapping
from dataclasses import dataclass


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

    def confidence(self, found: Mapping[str, int]) -> int | None:
        """Of its tokens for a request; None where it has none.

        Args:
            found: of the sources that have tokens, those left out that always have.
        """
        return found.get(self.name, 0 if self.takes_passes else None)
