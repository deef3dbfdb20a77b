"""Cells of the grid, their sets of measurements, and ratios within a set."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy

from vllm_triforce_bench.bench.methods import STOCK, Variant
from vllm_triforce_bench.bench.settings import EACH

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
VARIANT = ["method", "budget", "label"]
Pairs = list[tuple[dict, dict]]
"""Records of stock vLLM and of a variant, of the same set."""


def groups(variants: Sequence[Variant], engines_at_once: int) -> list[list[Variant]]:
    """Split the variants into groups of engines that live together, stock vLLM in each.

    Args:
        variants: stock vLLM first.
        engines_at_once: at least 1, which leaves each engine alone.
    """
    if engines_at_once == 1:
        return [[variant] for variant in variants]
    stock, others = variants[0], variants[1:]
    size = engines_at_once - 1
    return [[stock, *others[i : i + size]] for i in range(0, max(1, len(others)), size)]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Order of a repetition: each item is first in turn."""
    place = turn % len(items)
    return [*items[place:], *items[:place]]


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


def pairs_by_row(records: list[dict]) -> list[tuple[dict, Pairs]]:
    """Pair each record with stock vLLM's of its set: same prompts, one right after the other.

    Where stock vLLM is not in the group, it is the first group, alone.

    Returns:
        Columns of cell and variant, and their pairs: cells in order, variants in the order of
        their names.
    """
    records = whole_sets(records)
    stock = {set_of(record): record for record in records if record["method"] == STOCK}
    pairs_by_key: dict[tuple, Pairs] = defaultdict(list)
    for record in records:
        key = tuple(record[name] for name in CELL + VARIANT)
        paired = set_of(record)
        beside = stock.get(paired, stock.get(paired._replace(group=0)))
        if beside is not None:
            pairs_by_key[key].append((beside, record))
    dtypes, labels = (
        list(dict.fromkeys(record[name] for record in records)) for name in ("dtype", "label")
    )
    rows = [(dict(zip(CELL + VARIANT, key)), pairs) for key, pairs in pairs_by_key.items()]

    def order(row: tuple[dict, Pairs]) -> tuple:
        dtype, *cell = (row[0][name] for name in CELL)
        return (dtypes.index(dtype), *cell, labels.index(row[0]["label"]))

    return sorted(rows, key=order)


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name: float(numpy.median(values)),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def batch_text(batch_size: int, context: int) -> str:
    return f"{batch_size} x {tokens_text(context)}{' tokens' * (context != EACH)}"


def tokens_text(tokens: int) -> str:
    if tokens == EACH:
        return "each prompt"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
