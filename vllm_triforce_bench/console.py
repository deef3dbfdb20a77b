"""Console of the tools: no pipe wraps their tables."""

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
