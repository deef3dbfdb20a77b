"""What is seen while it runs, and the table at its end."""

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
    found = Table(title="Decode speed against stock vLLM", header_style="bold")
    for name, justify in (
        ("dtype", "left"),
        ("context", "right"),
        ("batch", "right"),
        ("T", "right"),
        ("method", "left"),
        ("tokens/s", "right"),
        ("ratio (least to greatest)", "right"),
        ("first token, ms", "right"),
        ("ITL p50/p99, ms", "right"),
        ("accepted a step", "right"),
        ("greedy", "left"),
    ):
        found.add_column(name, justify=justify, no_wrap=name in ("tokens/s", "method"))
    last = None
    for row in rows:
        cell = (row["dtype"], row["context"], row["batch_size"], row["temperature"])
        if last not in (None, cell):
            found.add_section()
        shown = [""] * 4 if cell == last else [str(cell[0]), *(f"{value:g}" for value in cell[1:])]
        last = cell
        found.add_row(*shown, *_values(row))
    return found


def _values(row: dict) -> list[str]:
    length = row["mean_acceptance_length"]
    ratio = "1" if row["method"] == "stock" else ratio_text(row)
    return [
        row["label"],
        f"{row['decode_tokens_per_second']:.1f}",
        ratio,
        f"{row['time_to_first_token_ms']:.0f}",
        f"{row['inter_token_latency_p50_ms']:.1f} / {row['inter_token_latency_p99_ms']:.1f}",
        "" if length is None else f"{length:.2f}",
        _GREEDY.get(row["greedy"], ""),
    ]


def ratio_text(row: dict) -> str:
    ratio = row["ratio"]
    colour = "green" if ratio >= 1.03 else "red" if ratio < 0.97 else "default"
    return f"[{colour}]{ratio:.2f}x[/] ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
