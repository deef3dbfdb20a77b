"""What is measured, and in which order."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from vllm_triforce_bench.bench.methods import Variant

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One point of the grid; every method is measured at it."""

    dtype: str
    context: int
    """Tokens of each prompt."""
    batch_size: int
    temperature: float


@dataclass(frozen=True)
class PairedSet:
    """Each variant of a group at one cell, one right after the other: what ratios are made of."""

    cell: Cell
    group: int
    repetition: int

    def key(self) -> tuple:
        return (*asdict(self.cell).values(), self.group, self.repetition)


@dataclass(frozen=True)
class Prompts:
    """What is read once and then decoded at each temperature."""

    dtype: str
    group: int
    context: int
    batch_size: int
    repetition: int


def groups(variants: Sequence[Variant], engines_at_once: int) -> list[list[Variant]]:
    """Splits the variants so that few enough engines live at a time; stock is in every group.

    Args:
        variants: stock first.
        engines_at_once: at least 2.
    """
    stock, others = variants[0], variants[1:]
    size = engines_at_once - 1
    return [[stock, *others[i : i + size]] for i in range(0, max(1, len(others)), size)]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The order of a repetition: each comes first once in as many repetitions as there are."""
    place = turn % len(items)
    return [*items[place:], *items[:place]]


def paired_sets(
    dtypes: Sequence[str],
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
    repetitions: int,
    num_groups: int,
) -> list[PairedSet]:
    """In the order of measuring: engines change least often, prompts next."""
    return [
        PairedSet(Cell(dtype, context, batch_size, temperature), group, repetition)
        for dtype, group, context, batch_size, repetition, temperature in itertools.product(
            dtypes, range(num_groups), contexts, batch_sizes, range(repetitions), temperatures
        )
    ]


def by_prompts(sets: Sequence[PairedSet]) -> Iterator[tuple[Prompts, list[PairedSet]]]:
    """Runs of sets that decode the same prompts."""

    def prompts_of(paired: PairedSet) -> Prompts:
        cell = paired.cell
        return Prompts(cell.dtype, paired.group, cell.context, cell.batch_size, paired.repetition)

    for prompts, run in itertools.groupby(sets, prompts_of):
        yield prompts, list(run)


class TimeLeft:
    """Seconds left, from the sets that are finished.

    A set's weight is the tokens that it reads and those that it writes, a written one counting
    for as many read ones as ``WRITTEN_TOKEN``; weights only share out the time that was measured.
    """

    WRITTEN_TOKEN = 20

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._seconds = 0.0
        self._weight = 0.0

    def weight(self, paired: PairedSet) -> float:
        cell = paired.cell
        written = self._num_tokens * self.WRITTEN_TOKEN
        return cell.batch_size * (cell.context + written)

    def finished(self, paired: PairedSet, seconds: float) -> None:
        self._seconds += seconds
        self._weight += self.weight(paired)

    def seconds(self, remaining: Sequence[PairedSet]) -> float | None:
        """None where nothing is finished yet."""
        if not self._weight:
            return None
        return self._seconds / self._weight * sum(map(self.weight, remaining))
