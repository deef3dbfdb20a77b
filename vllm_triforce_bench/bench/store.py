"""The output folder: what was asked for, every measurement, and what is made of them."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.grid import Cell, PairedSet

ARGUMENTS = "arguments.json"
MEASUREMENTS = "results.jsonl"


class Store:
    """Opens a folder, or makes it.

    Args:
        asked_for: what the measurements depend on; JSON values.

    Raises:
        BadInput: the folder holds measurements of something else.
    """

    def __init__(self, folder: Path, asked_for: dict) -> None:
        self.folder = folder
        asked_for = json.loads(json.dumps(asked_for))
        arguments = folder / ARGUMENTS
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"--output {folder} is not a folder")
        if arguments.exists():
            _refuse_another(folder, json.loads(arguments.read_text())["arguments"], asked_for)
        elif folder.exists() and (folder / MEASUREMENTS).exists():
            raise BadInput(f"--output {folder} has {MEASUREMENTS} but no {ARGUMENTS}; use another")
        folder.mkdir(parents=True, exist_ok=True)
        self._settled = json.loads(arguments.read_text())["settled"] if arguments.exists() else {}
        self._asked_for = asked_for
        self._write_arguments()
        self.records: list[dict] = self._load(folder / MEASUREMENTS)

    def _load(self, path: Path) -> list[dict]:
        """What a run that was ended has left, without the set that was cut off."""
        found, is_whole = _read(path)
        records = _whole_sets(found)
        if not is_whole or len(records) < len(found):
            _replace(path, _lines(records))
        return records

    def settle(self, name: str, choose: Callable[[], Any]) -> Any:
        """What the first run chose, so that a later one goes on with the same."""
        if name not in self._settled:
            self._settled[name] = choose()
            self._write_arguments()
        return self._settled[name]

    def done(self) -> set[tuple]:
        """Keys of the sets that are measured."""
        return {set_key(record) for record in self.records}

    def append(self, records: list[dict]) -> None:
        """Adds the measurements of one set, each with how many they are."""
        records = [record | {"num_paired": len(records)} for record in records]
        with (self.folder / MEASUREMENTS).open("a") as file:
            file.write(_lines(records))
        self.records += records

    def _write_arguments(self) -> None:
        text = json.dumps({"arguments": self._asked_for, "settled": self._settled}, indent=1)
        _replace(self.folder / ARGUMENTS, text + "\n")


def set_key(record: dict) -> tuple:
    """``PairedSet.key()`` of a measurement."""
    cell = Cell(*(record[name] for name in Cell.__dataclass_fields__))
    return PairedSet(cell, record["group"], record["repetition"]).key()


def read_lines(path: Path) -> list[dict]:
    """Whole lines; the last may have been cut off when a run was ended."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict], bool]:
    """Whole lines, and whether there is nothing else; the last line may have been cut off when a
    run was ended."""
    *lines, rest = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines], not rest


def _lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _replace(path: Path, text: str) -> None:
    """Whenever the process is ended, the file is either as it was or as it shall be."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _whole_sets(records: list[dict]) -> list[dict]:
    """Without the measurements of a set that was cut off: it is measured again."""
    counts = Counter(map(set_key, records))
    return [record for record in records if counts[set_key(record)] == record["num_paired"]]


def _refuse_another(folder: Path, found: dict, asked_for: dict) -> None:
    differing = [
        f"{name} {json.dumps(found.get(name))} there, {json.dumps(asked_for.get(name))} here"
        for name in sorted(found.keys() | asked_for.keys())
        if found.get(name) != asked_for.get(name)
    ]
    if differing:
        raise BadInput(
            f"--output {folder} holds measurements made with other arguments "
            f"({'; '.join(differing)}); give the same ones, or another folder"
        )
