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
