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
    is_narrow = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    # Named, because a load generator redirects sys.stdout later.
    return Console(file=sys.stdout, width=None if is_narrow else FILE_WIDTH)


class Progress(bar.Progress):
    """A bar with the time left and the current work; without a terminal, lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(
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
        self._work = self.add_task("", total=None)

    def begin(self, work: float) -> None:
        """Start the clock of this much work, in any unit."""
        self.reset(self._work, total=work)
        self.done(0)

    def say(self, text: str) -> None:
        self.update(self._work, description=text)

    def done(self, work: float) -> None:
        self.advance(self._work, work)

    def report(self, text: str) -> None:
        """Print a line with the time left, without a terminal."""
        if self.console.is_terminal:
            return
        seconds = self.tasks[0].time_remaining
        left = "time left: not known yet" if seconds is None else f"{timedelta(0, seconds)} left"
        self.console.print(f"{text}, {left}", soft_wrap=True, highlight=False)
