"""Cells of traffic: a grid, or a sequence from a file."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vllm_triforce_bench.bench import BadInput

RANDOM, HELD_OUT, MIXED = "random", "held-out", "mixed"
TEXTS = (RANDOM, HELD_OUT, MIXED)


@dataclass(frozen=True)
class Cell:
    """One kind of traffic.

    Args:
        text: source of the prompts, of ``TEXTS``.
        input_len, output_len: tokens of each prompt and answer.
        request_rate: requests per second; None for a new one as soon as there is room.
        concurrency: maximum of requests under way.
    """

    text: str
    input_len: int
    output_len: int
    request_rate: float | None
    concurrency: int
    temperature: float

    def __post_init__(self) -> None:
        if self.text not in TEXTS:
            raise BadInput(f"text {self.text!r} is unknown; known: {', '.join(TEXTS)}")
        for name, low in (("input_len", 2), ("output_len", 2), ("concurrency", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise BadInput(f"{name} {value!r} must be a whole number of at least {low}")
        if not (_is_number(self.temperature) and 0 <= self.temperature <= 2):
            raise BadInput(f"temperature {self.temperature!r} must be between 0 and 2")
        rate = self.request_rate
        if rate is not None and not (_is_number(rate) and rate > 0):
            raise BadInput(f"request rate {rate!r} must be more than 0, or inf")

    @property
    def needs_prompts(self) -> bool:
        return self.text != RANDOM

    def describe(self) -> str:
        rate = "" if self.request_rate is None else f" at {self.request_rate:g}/s"
        return (
            f"{self.concurrency} x {self.input_len:,}+{self.output_len} {self.text}{rate}, "
            f"T={self.temperature:g}"
        )

    def to_dict(self) -> dict:
        return asdict(self)


def request_rate(text: str) -> float | None:
    """Parse a request rate: a number, or ``inf``, which is None."""
    value = float(text)
    return None if value == math.inf else value


def grid(
    texts: Sequence[str],
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    request_rates: Sequence[float | None],
    concurrencies: Sequence[int],
    temperatures: Sequence[float],
) -> list[Cell]:
    """Combine all values.

    Temperatures follow each other: a server has learned from the last when the next comes.
    """
    return [
        Cell(*values)
        for values in itertools.product(
            texts, input_lens, output_lens, request_rates, concurrencies, temperatures
        )
    ]


def from_file(path: Path) -> list[Cell]:
    """Read a sequence of cells, in which a cell may come again.

    Raises:
        BadInput: the file is no JSON list of cells.
    """
    names = [field.name for field in fields(Cell)]
    example = '[{"text": "random", "input_len": 512, "output_len": 128, "concurrency": 4, '
    example += '"temperature": 0}]'
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--sequence {path} cannot be read ({error}); it holds {example}") from error
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"--sequence {path} is not a list of cells such as {example}")
    sequence = []
    for i, entry in enumerate(entries):
        place = f"--sequence {path}, cell {i}"
        if not isinstance(entry, dict):
            raise BadInput(f"{place}: {entry!r} is not an object; write {example}")
        entry = {"request_rate": None, **entry}
        if wrong := sorted(set(entry) ^ set(names)):
            raise BadInput(f"{place}: {', '.join(wrong)} is unknown or missing; write {example}")
        try:
            if isinstance(entry["request_rate"], str):
                entry["request_rate"] = request_rate(entry["request_rate"])
            sequence.append(Cell(**entry))
        except ValueError as error:
            raise BadInput(f"{place}: {error}") from error
    return sequence


def _is_number(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
