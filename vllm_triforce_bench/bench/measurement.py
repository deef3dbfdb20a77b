"""The output folder of a benchmark, and the loop over its sets, as far as both share it."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig

from vllm_triforce_bench.bench.grid import PairedSet, batch_text, set_of, whole_sets
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.prompts import Prompts
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.console import Progress
from vllm_triforce_bench.options import BadInput

ARGUMENTS = "arguments.json"
MEASUREMENTS = "results.jsonl"


class Store:
    """A folder of measurements; a run that is ended loses the measurement that it was at.

    Args:
        arguments: JSON values that the measurements depend on.

    Raises:
        BadInput: the folder holds measurements with other arguments.
    """

    def __init__(self, folder: Path, arguments: dict) -> None:
        self.folder = folder
        self._arguments = json.loads(json.dumps(arguments))
        self._settled: dict[str, Any] = {}
        file, measurements = folder / ARGUMENTS, folder / MEASUREMENTS
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"--output {folder} is not a folder")
        if file.exists():
            earlier = json.loads(file.read_text())
            there, here = earlier["arguments"], self._arguments
            differences = [
                f"{name} {json.dumps(there.get(name))} there, {json.dumps(here.get(name))} here"
                for name in sorted(there.keys() | here.keys())
                if there.get(name) != here.get(name)
            ]
            if differences:
                raise BadInput(
                    f"--output {folder} holds measurements made with other arguments "
                    f"({'; '.join(differences)}); give the same ones, or another folder"
                )
            self._settled = earlier["settled"]
        elif measurements.exists():
            raise BadInput(f"--output {folder} has {MEASUREMENTS} but no {ARGUMENTS}; use another")
        folder.mkdir(parents=True, exist_ok=True)
        self._write_arguments()
        text = measurements.read_bytes() if measurements.exists() else b""
        end = text.rfind(b"\n") + 1
        if end < len(text):  # a line that was cut off when a run was ended
            os.truncate(measurements, end)
        self.records = [json.loads(line) for line in text[:end].splitlines()]

    def settle(self, name: str, choose: Callable[[], Any]) -> Any:
        """Return the first run's choice, so that later runs go on with it."""
        if name not in self._settled:
            self._settled[name] = choose()
            self._write_arguments()
        return self._settled[name]

    def append(self, records: list[dict]) -> None:
        with (self.folder / MEASUREMENTS).open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        self.records += records

    def _write_arguments(self) -> None:
        content = {"arguments": self._arguments, "settled": self._settled}
        # Whenever the process is ended, the file is either the earlier or the new one.
        fresh = self.folder / f"{ARGUMENTS}.new"
        with fresh.open("w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.folder / ARGUMENTS)


@dataclass
class BaseMeasurement(ABC):
    """Measures sets and stores their records."""

    settings: Settings
    groups: list[list[Variant]]
    store: Store
    prompts: Prompts
    target: ModelConfig
    draft: ModelConfig | None
    progress: Progress

    def run(self, sets: Sequence[PairedSet]) -> None:
        """Measure sets that are not in the store yet, in their order."""
        done = set(map(set_of, whole_sets(self.store.records)))
        todo = [paired for paired in sets if paired not in done]
        self._num_done, self._num_sets = len(sets) - len(todo), len(sets)
        if self._num_done:
            text = f"{self._num_done} of {self._num_sets} sets are in {self.store.folder} already"
            self.progress.console.print(text)
        self.progress.begin(sum(map(self._work, todo)))
        self._run(todo)

    @abstractmethod
    def _run(self, sets: Sequence[PairedSet]) -> None:
        """Measure the sets, and finish each."""

    def _finish(self, paired: PairedSet, records: list[dict]) -> None:
        self.store.append(records)
        self._num_done += 1
        self.progress.done(self._work(paired))
        self.progress.report(f"{self._num_done} of {self._num_sets} sets")

    def _work(self, paired: PairedSet) -> float:
        """Estimate the work of a set: a written token counts for 20 read ones."""
        context = paired.context or self.settings.longest_prompt
        num_reqs = self.settings.num_requests(paired.batch_size)
        return num_reqs * (context + 20 * self.settings.tokens)

    def _begin(self, variant: Variant, paired: PairedSet, place: int, num_paired: int) -> dict:
        """Show the current work, and begin its record."""
        self.progress.say(
            f"{variant.label}: {batch_text(paired.batch_size, paired.context)}, {paired.dtype}, "
            f"T={paired.temperature:g}, repetition {paired.repetition + 1}"
        )
        return {
            **paired._asdict(),
            "method": variant.method,
            "budget": variant.budget,
            "label": variant.label,
            "order": place,
            "num_paired": num_paired,
        }
