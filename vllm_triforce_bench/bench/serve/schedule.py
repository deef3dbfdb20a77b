"""Who runs against whom, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

BASELINE, CHALLENGER = "baseline", "challenger"


@dataclass(frozen=True)
class Contest:
    """Two servers whose runs make pairs."""

    challenger: str
    baseline: str

    @property
    def name(self) -> str:
        return f"{self.challenger}/{self.baseline}"

    def server(self, role: str) -> str:
        return self.baseline if role == BASELINE else self.challenger


@dataclass(frozen=True)
class Pair:
    """Both servers of a contest at one cell, one right after the other, on the same requests."""

    contest: Contest
    half: int
    pair: int
    cell_index: int

    def key(self) -> tuple:
        return (self.contest.name, self.half, self.pair, self.cell_index)

    @property
    def roles(self) -> tuple[str, str]:
        """In the order of their turns: it alternates from pair to pair, and from cell to cell."""
        order = (BASELINE, CHALLENGER)
        return order if (self.pair + self.cell_index) % 2 == 0 else order[::-1]


@dataclass(frozen=True)
class Phase:
    """Between two starts of servers."""

    contest: Contest
    half: int
    pairs: range

    @property
    def start_order(self) -> tuple[str, str]:
        """The server that starts first may be favoured: in the second half it is the other."""
        order = (BASELINE, CHALLENGER)
        return order if self.half == 0 else order[::-1]

    def schedule(self, num_cells: int) -> list[Pair]:
        """The whole sequence of cells, then again: each cell comes after the same one each time."""
        return [
            Pair(self.contest, self.half, pair, cell_index)
            for pair in self.pairs
            for cell_index in range(num_cells)
        ]


def phases(contests: Sequence[Contest], pairs: int) -> list[Phase]:
    """All contests with the first half of the pairs, then all with the second, in reverse."""
    middle = (pairs + 1) // 2
    found = [Phase(contest, 0, range(middle)) for contest in contests]
    found += [Phase(contest, 1, range(middle, pairs)) for contest in reversed(contests)]
    return [phase for phase in found if phase.pairs]
