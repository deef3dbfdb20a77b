"""Cells of the grid, and the order of their measurement."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from vllm_triforce_bench.bench.batch.settings import BatchSettings
from vllm_triforce_bench.bench.methods import Variant

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A point of the grid, at which every method is measured; ``context`` is in tokens."""

    dtype: str
    context: int
    batch_size: int
    temperature: float


@dataclass(frozen=True)
class PairedSet:
    """The variants of a group at one cell, one right after the other; ratios are made within it."""

    cell: Cell
    group: int
    repetition: int

    def key(self) -> tuple:
        return (*asdict(self.cell).values(), self.group, self.repetition)


@dataclass(frozen=True)
class Prompts:
    """Prompts that are read once and decoded at each temperature."""

    dtype: str
    group: int
    context: int
    batch_size: int
    repetition: int


def groups(variants: Sequence[Variant], engines_at_once: int) -> list[list[Variant]]:
    """Split the variants into groups of engines that live together, stock vLLM in each.

    Args:
        variants: stock vLLM first.
        engines_at_once: at least 2.
    """
    stock, others = variants[0], variants[1:]
    size = engines_at_once - 1
    return [[stock, *others[i : i + size]] for i in range(0, max(1, len(others)), size)]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Order of a repetition: each item is first in turn."""
    place = turn % len(items)
    return [*items[place:], *items[:place]]


def paired_sets(settings: BatchSettings, num_groups: int) -> list[PairedSet]:
    """List the sets in the order of measurement: engines change least often, prompts next."""
    return [
        PairedSet(Cell(dtype, context, batch_size, temperature), group, repetition)
        for dtype, group, context, batch_size, repetition, temperature in itertools.product(
            settings.dtypes,
            range(num_groups),
            settings.contexts,
            settings.batch_sizes,
            range(settings.repetitions),
            settings.temperatures,
        )
    ]


def by_prompts(sets: Sequence[PairedSet]) -> Iterator[tuple[Prompts, list[PairedSet]]]:
    """Group sets that decode the same prompts."""

    def prompts_of(paired: PairedSet) -> Prompts:
        cell = paired.cell
        return Prompts(cell.dtype, paired.group, cell.context, cell.batch_size, paired.repetition)

    for prompts, run in itertools.groupby(sets, prompts_of):
        yield prompts, list(run)


def set_key(record: dict) -> tuple:
    """``PairedSet.key()`` of a record."""
    names = (*Cell.__dataclass_fields__, "group", "repetition")
    return tuple(record[name] for name in names)


def whole_sets(records: Sequence[dict]) -> list[dict]:
    """Return the records of whole sets; one that was cut off is measured again."""
    sets: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        sets[set_key(record)].append(record)
    whole = []
    for members in sets.values():
        size = members[-1]["num_paired"]
        if len(members) >= size:
            whole += members[-size:]
    return whole
