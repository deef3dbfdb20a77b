"""Progress of the lab, on stderr."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.progress import TimeRemainingColumn as Remaining

from vllm_triforce_bench.console import time_left
from vllm_triforce_bench.lab.contexts import Context
from vllm_triforce_bench.lab.measure import query_key_pairs


class LabProgress:
    """A bar with the time left; without a terminal, a line for each experiment on a prompt."""

    def __init__(self, contexts: list[Context]) -> None:
        self._console = Console(stderr=True)
        self._count = len(contexts)
        self._total = sum(query_key_pairs(context) for context in contexts)
        self._done = 0
        self._began = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Elapsed())
        self._bar = Progress(
            *columns,
            Remaining(),
            console=self._console,
            speed_estimate_period=600,
            disable=not self._console.is_terminal,
        )
        self._prompt = ""
        self._task = self._bar.add_task("", total=self._total)

    def __enter__(self) -> "LabProgress":
        self._bar.start()
        self._line(f"0 of {self._count} prompts")
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    def begin(self, number: int, context: Context) -> None:
        kind = "stretch" if context.needle_depth is None else "needle"
        self._prompt = f"{kind} {number} of {self._count}, {len(context.prompt)} tokens"
        self._bar.update(self._task, description=self._prompt)

    def advance(self, pairs: int) -> None:
        self._done += pairs
        self._bar.advance(self._task, pairs)

    def finished(self, experiment: str) -> None:
        """Count an experiment on the current prompt."""
        self._line(f"{self._prompt}, {experiment}: {self._done / self._total:.0%}")

    def _line(self, text: str) -> None:
        if self._console.is_terminal:
            return
        seconds = None
        if self._done:
            elapsed = time.perf_counter() - self._began
            seconds = elapsed * max(0, self._total - self._done) / self._done
        self._console.print(f"{text}, {time_left(seconds)}", soft_wrap=True, highlight=False)
