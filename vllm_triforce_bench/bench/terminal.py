"""What is seen while it runs, and the table at its end."""

from rich import box
from rich import progress as bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_triforce_bench.time_left import time_left

_GREEDY = {
    "identical": "[green]identical",
    "tie": "[yellow]tie",
    "different": "[bold red]DIFFERENT",
}


class Progress:
    """A bar over sets with the time left and what goes on; lines where there is no terminal.

    Args:
        things: what is counted.
    """

    def __init__(self, console: Console, total: int, done: int, things: str = "sets") -> None:
        self._console, self._total, self._things = console, total, things
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
        self._bar.update(self._task, description=text)

    def advance(self, remaining: int, seconds_left: float | None) -> None:
        left = time_left(seconds_left)
        self._bar.update(self._task, completed=self._total - remaining, left=left)
        if not self._console.is_terminal:
            self._console.print(
                f"{self._total - remaining} of {self._total} {self._things}, {left}"
            )


def table(rows: list[dict]) -> Table:
    found = Table(box=box.SIMPLE, pad_edge=False)
    has_passes = any("outside_passes_share" in row for row in rows)
    for name in (
        "",
        "tokens/s",
        "ratio",
        "spread",
        "TTFT ms",
        "ITL p50",
        "p99",
        "length",
        "greedy",
        *(["beside passes"] if has_passes else []),
    ):
        found.add_column(name, justify="right" if name not in ("", "greedy") else "left")
    last = None
    for row in rows:
        cell = cell_text(row)
        if cell != last:
            if last is not None:
                found.add_section()
            found.add_row(f"[bold]{cell}")
        last = cell
        found.add_row(*_values(row), *([_beside_passes(row)] if has_passes else []))
    return found


def cell_text(row: dict) -> str:
    return (
        f"{row['batch_size']} x {row['context']:,} tokens, T={row['temperature']:g}, {row['dtype']}"
    )


def _beside_passes(row: dict) -> str:
    if "outside_passes_share" not in row:
        return ""
    share, milliseconds = row["outside_passes_share"], row["outside_passes_ms_a_step"]
    return f"{share:.0%}, {milliseconds:.1f} ms a step"


def _values(row: dict) -> list[str]:
    length = row["mean_acceptance_length"]
    is_stock = row["method"] == "stock"
    return [
        f"  {row['label']}",
        f"{row['decode_tokens_per_second']:.1f}",
        "1" if is_stock else _coloured(row["ratio"]),
        "" if is_stock else f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}",
        f"{row['time_to_first_token_ms']:.0f}",
        f"{row['inter_token_latency_p50_ms']:.1f}",
        f"{row['inter_token_latency_p99_ms']:.1f}",
        "" if length is None else f"{length:.2f}",
        _GREEDY.get(row["greedy"], ""),
    ]


def _coloured(ratio: float) -> str:
    colour = "green" if ratio >= 1.03 else "red" if ratio < 0.97 else "default"
    return f"[{colour}]{ratio:.2f}x[/]"
