"""Where words, bars and tables are printed."""

import os
import sys

from rich.console import Console

# Wider than any table of the benchmark or the lab, so that none of its cells is wrapped.
FILE_WIDTH = 200


def stdout_console() -> Console:
    """A console on the present standard output.

    A file or a pipe has no width, for which rich would take 80 columns and wrap the tables' cells;
    it gets what ``COLUMNS`` says, else ``FILE_WIDTH``.
    """
    # Named, because a load's own words may go elsewhere meanwhile.
    console = Console(file=sys.stdout)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(file=sys.stdout, width=FILE_WIDTH)
