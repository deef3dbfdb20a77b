"""Cells of the grid, and the order of their measurement."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from vllm_triforce_bench.bench.batch.settings import BatchSettings
from vllm_triforce_bench.bench.methods import Variant

T = TypeVar("T")


class PairedSet(NamedTuple):
    """The variants of a group at one cell, one right after the other; ratios are made within it.

    Args:
        context: tokens of a prompt.
        group: number of the engines that live together.
    """

    dtype: str
    context: int
    batch_size: int
    temperature: float
    group: int
    repetition: int


CELL = list(PairedSet._fields[:4])


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
        PairedSet(dtype, context, batch_size, temperature, group, repetition)
        for dtype, group, context, batch_size, repetition, temperature in itertools.product(
            settings.dtypes,
            range(num_groups),
            settings.contexts,
            settings.batch_sizes,
            range(settings.repetitions),
            settings.temperatures,
        )
    ]


def by_prompts(sets: Sequence[PairedSet]) -> Iterator[list[PairedSet]]:
    """Group sets that decode the same prompts: they differ in temperature alone."""
    for _, run in itertools.groupby(sets, lambda paired: paired._replace(temperature=0)):
        yield list(run)


def set_of(record: dict) -> PairedSet:
    return PairedSet(*(record[name] for name in PairedSet._fields))


def whole_sets(records: Sequence[dict]) -> list[dict]:
    """Return the records of whole sets; one that was cut off is measured again."""
    sets: dict[PairedSet, list[dict]] = defaultdict(list)
    for record in records:
        sets[set_of(record)].append(record)
    whole = []
    for members in sets.values():
        size = members[-1]["num_paired"]
        if len(members) >= size:
            whole += members[-size:]
    return whole
