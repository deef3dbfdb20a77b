"""The output folder: one line for each run, added as it ends."""

import json
import os
from pathlib import Path

from vllm_triforce_bench.bench.store import MEASUREMENTS, Store, read_lines


class RunStore(Store):
    """A folder of runs; a benchmark that is killed loses the run that it was at.

    Nothing that was measured is written again: a pair of which only the first run ended is
    measured anew, and its line stays behind without a counterpart.
    """

    def done(self) -> set[tuple]:
        """Keys of the pairs that are measured."""
        return {pair_key(baseline) for baseline, _ in paired(self.records)}

    def append(self, records: list[dict]) -> None:
        with (self.folder / MEASUREMENTS).open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        self.records += records

    def _load(self, path: Path) -> list[dict]:
        text = path.read_bytes() if path.exists() else b""
        if text and not text.endswith(b"\n"):
            # A line that was cut off.
            with path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
        return read_lines(path)


def pair_key(record: dict) -> tuple:
    """``Pair.key()`` of a run."""
    return tuple(record[name] for name in ("contest", "half", "pair", "cell_index"))


def paired(records: list[dict]) -> list[tuple[dict, dict]]:
    """Runs of baseline and challenger that came one right after the other."""
    found: list[tuple[dict, dict]] = []
    waiting: dict | None = None
    for record in records:
        if (
            waiting is not None
            and pair_key(waiting) == pair_key(record)
            and (waiting["turn"], record["turn"]) == (0, 1)
        ):
            pair = (waiting, record)
            found.append(pair if waiting["role"] == "baseline" else pair[::-1])
            waiting = None
        else:
            waiting = record
    return found
