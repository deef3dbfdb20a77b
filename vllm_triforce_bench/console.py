"""Console and progress of the tools: tables that no pipe wraps, a bar on a terminal alone."""

import math
import os
import sys
from datetime import timedelta

from rich import progress as bar
from rich.console import Console

# Columns of a file or pipe: more than any table of the benchmark or the lab.
FILE_WIDTH = 200


def stdout_console() -> Console:
    """Make a console on the current standard output.

    Rich would take 80 columns for a file or pipe and wrap the cells of tables; here it has
    ``COLUMNS``, or ``FILE_WIDTH``.
    """
    # Named, because a load generator redirects sys.stdout later.
    console = Console(file=sys.stdout)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(file=sys.stdout, width=FILE_WIDTH)


class Progress:
    """A bar with the time left and the current work; without a terminal, lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = bar.Progress(
            bar.BarColumn(bar_width=30),
            bar.TaskProgressColumn(),
            bar.TimeElapsedColumn(),
            bar.TimeRemainingColumn(),
            bar.TextColumn("[dim]{task.description}"),
            console=console,
            transient=True,
            speed_estimate_period=math.inf,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    @property
    def percentage(self) -> float:
        return self._bar.tasks[0].percentage

    def begin(self, work: float) -> None:
        """Start the clock of this much work, in any unit."""
        self._bar.reset(self._task, total=work)
        self._bar.advance(self._task, 0)

    def say(self, text: str) -> None:
        """Show the current work."""
        self._bar.update(self._task, description=text)

    def advance(self, work: float) -> None:
        self._bar.advance(self._task, work)

    def report(self, text: str) -> None:
        """Print a line with the time left, without a terminal."""
        if self._console.is_terminal:
            return
        seconds = self._bar.tasks[0].time_remaining
        left = "time left: not known yet" if seconds is None else f"{timedelta(0, seconds)} left"
        self._console.print(f"{text}, {left}", soft_wrap=True, highlight=False)
