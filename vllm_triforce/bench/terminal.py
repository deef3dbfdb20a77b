"""What is seen while it runs, and the table at its end."""

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_GREEDY = {
    "identical": "[green]identical",
    "tie": "[yellow]tie",
    "different": "[bold red]DIFFERENT",
}


def progress(console: Console) -> Progress:
    """A bar over sets, the time left as ``fields["left"]``, a line of what goes on."""
    return Progress(
        TextColumn("[bold]{task.fields[title]}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("[dim]{task.description}"),
        console=console,
    )


def time_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left: not known yet"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left"


def table(rows: list[dict]) -> Table:
    found = Table(box=box.SIMPLE, pad_edge=False)
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
        found.add_row(*_values(row))
    return found


def cell_text(row: dict) -> str:
    return (
        f"{row['batch_size']} x {row['context']:,} tokens, T={row['temperature']:g}, {row['dtype']}"
    )


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
