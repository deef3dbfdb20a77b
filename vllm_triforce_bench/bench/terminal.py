"""Progress and tables on the terminal."""

from collections.abc import Iterable, Sequence

from rich import box
from rich import progress as bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_triforce_bench.console import time_left


class Progress:
    """A bar with the time left and the current work; without a terminal, a line for each unit.

    Args:
        units: name of the counted units.
    """

    def __init__(self, console: Console, total: int, done: int, units: str) -> None:
        self._console, self._total, self._units = console, total, units
        self._bar = bar.Progress(
            TextColumn("[bold]bench"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} "),
            TextColumn("[dim]{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, completed=done, left="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Show the current work."""
        self._bar.update(self._task, description=text)

    def advance(self, remaining: int, seconds_left: float | None) -> None:
        done, left = self._total - remaining, time_left(seconds_left)
        self._bar.update(self._task, completed=done, left=left)
        if not self._console.is_terminal:
            self._console.print(f"{done} of {self._total} {self._units}, {left}")


class TimeLeft:
    """Seconds left, from the finished units and their tokens.

    Only shares of the measured time depend on the weights: a written token counts for 20 read
    ones.
    """

    WRITTEN_TOKEN = 20

    def __init__(self) -> None:
        self._seconds = self._weight = 0.0

    @classmethod
    def weight(cls, num_reqs: int, read: int, written: int) -> float:
        """Weight of requests that read and write this number of tokens each."""
        return num_reqs * (read + cls.WRITTEN_TOKEN * written)

    def finish(self, weight: float, seconds: float) -> None:
        self._seconds += seconds
        self._weight += weight

    def seconds(self, weights: Iterable[float]) -> float | None:
        """Seconds of the remaining units; None before the first is finished."""
        return self._seconds / self._weight * sum(weights) if self._weight else None


def make_table(columns: Sequence[str], left: Sequence[str], rows: Iterable[tuple]) -> Table:
    """Make a table whose rows stand below the names of their cells.

    Args:
        left: columns that are aligned left.
        rows: key and name of a cell, and values of a row; rows of a cell follow each other.
    """
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    last = None
    for key, cell, values in rows:
        if key != last:
            if last is not None:
                table.add_section()
            table.add_row(f"[bold]{cell}")
        last = key
        table.add_row(*values)
    return table
