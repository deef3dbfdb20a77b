"""Order of runs: contests, their halves, and pairs."""

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
    """Runs of both servers at one cell, one right after the other, on the same requests."""

    contest: Contest
    half: int
    pair: int
    cell_index: int

    def key(self) -> tuple:
        return (self.contest.name, self.half, self.pair, self.cell_index)

    @property
    def roles(self) -> tuple[str, str]:
        """Roles in the order of their turns, which alternates over pairs and over cells."""
        order = (BASELINE, CHALLENGER)
        return order if (self.pair + self.cell_index) % 2 == 0 else order[::-1]


@dataclass(frozen=True)
class Phase:
    """Pairs between two starts of servers."""

    contest: Contest
    half: int
    pairs: range

    @property
    def start_order(self) -> tuple[str, str]:
        """Roles in the order of their start, reversed in the second half."""
        order = (BASELINE, CHALLENGER)
        return order if self.half == 0 else order[::-1]

    def schedule(self, num_cells: int) -> list[Pair]:
        """Repeat the whole sequence of cells: each comes after the same one each time."""
        return [
            Pair(self.contest, self.half, pair, cell_index)
            for pair in self.pairs
            for cell_index in range(num_cells)
        ]


def phases(contests: Sequence[Contest], pairs: int) -> list[Phase]:
    """List all contests with the first half of the pairs, then in reverse with the second."""
    middle = (pairs + 1) // 2
    halves = [Phase(contest, 0, range(middle)) for contest in contests]
    halves += [Phase(contest, 1, range(middle, pairs)) for contest in reversed(contests)]
    return [phase for phase in halves if phase.pairs]


def pair_key(record: dict) -> tuple:
    """``Pair.key()`` of a run's record."""
    return tuple(record[name] for name in ("contest", "half", "pair", "cell_index"))


def paired(records: Sequence[dict]) -> list[tuple[dict, dict]]:
    """Return the runs of baseline and challenger that came one right after the other.

    A first run without its second is left out: the pair is measured anew.
    """
    pairs: list[tuple[dict, dict]] = []
    first: dict | None = None
    for record in records:
        if (
            first is not None
            and pair_key(first) == pair_key(record)
            and (first["turn"], record["turn"]) == (0, 1)
        ):
            pair = (first, record)
            pairs.append(pair if first["role"] == BASELINE else pair[::-1])
            first = None
        else:
            first = record
    return pairs
