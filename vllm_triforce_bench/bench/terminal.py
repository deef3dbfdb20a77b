"""Progress and tables on the terminal."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_triforce_bench.progress import Progress

_WRITTEN_TOKEN = 20


def work_of(num_reqs: int, read: int, written: int) -> float:
    """Estimate the work of requests that read and write this number of tokens each.

    A written token counts for 20 read ones.
    """
    return num_reqs * (read + _WRITTEN_TOKEN * written)


class UnitProgress(Progress):
    """Progress in counted units.

    Args:
        num_done: units that earlier runs have finished.
        units: name of the units.
    """

    def __init__(self, console: Console, total: int, num_done: int, units: str) -> None:
        super().__init__(console)
        self._total, self._num_done, self._units = total, num_done, units

    def finish_unit(self, work: float) -> None:
        self._num_done += 1
        self.advance(work)
        self.report(f"{self._num_done} of {self._total} {self._units}")


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
