"""Console of the tools: tables that no pipe wraps, and the time left in words."""

import os
import sys

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


def time_left(seconds: float | None) -> str:
    """Format the time left; None before the first measurement."""
    if seconds is None:
        return "time left: not known yet"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left"
