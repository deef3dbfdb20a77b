"""Cells of traffic: a grid, or a sequence from a file."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from vllm_triforce_bench.bench.settings import RequestRate
from vllm_triforce_bench.options import BadInput, checked

RANDOM, HELD_OUT, MIXED = "random", "held-out", "mixed"


@dataclass(frozen=True)
class Cell:
    """One kind of traffic; ``_checked_cell`` makes it from a user's values.

    Args:
        text: source of the prompts.
        input_len, output_len: tokens of each prompt and answer.
        concurrency: maximum of requests under way.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    text: Literal["random", "held-out", "mixed"]
    input_len: Annotated[int, Field(ge=2)]
    output_len: Annotated[int, Field(ge=2)]
    request_rate: RequestRate | None
    concurrency: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]

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


_checked_cell = checked(Cell)


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

    Raises:
        BadInput: a value is out of range.
    """
    names = [field.name for field in fields(Cell)]
    combined = itertools.product(
        texts, input_lens, output_lens, request_rates, concurrencies, temperatures
    )
    return [_checked_cell(dict(zip(names, values))) for values in combined]


def from_file(path: Path) -> list[Cell]:
    """Read a sequence of cells, in which a cell may come again.

    Raises:
        BadInput: the file is no JSON list of cells.
    """
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
        try:
            sequence.append(_checked_cell({"request_rate": None, **entry}))
        except (BadInput, TypeError) as error:
            place = f"--sequence {path}, cell {i}"
            raise BadInput(f"{place}: {error}; write {example}") from error
    return sequence
