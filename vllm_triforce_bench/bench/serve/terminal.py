"""The table at the end."""

from rich import box
from rich.table import Table

from vllm_triforce_bench.bench.serve.summary import COUNTS, EVEN, FASTER, SHOWN, cell_of

_COLOURS = {EVEN: "default", FASTER: "green"}


def table(rows: list[dict]) -> Table:
    """Ratios of each contest, least and greatest behind them."""
    found = Table(box=box.SIMPLE, pad_edge=False)
    found.add_column("")
    for title in SHOWN.values():
        found.add_column(title, justify="right")
    found.add_column("length", justify="right")
    for title in COUNTS:
        found.add_column(title, justify="right")
    found.add_column("")
    last = None
    for row in rows:
        if row["cell_index"] != last:
            if last is not None:
                found.add_section()
            found.add_row(f"[bold]{cell_of(row).describe()}")
        last = row["cell_index"]
        length = row["mean_acceptance_length"]
        colour = _COLOURS.get(row["verdict"], "red")
        found.add_row(
            f"  {row['challenger']} / {row['baseline']}",
            *(spread(row, name) for name in SHOWN),
            "" if length is None else f"{length:.2f}",
            *(counts(row, name) for name in COUNTS),
            f"[{colour}]{row['verdict']}[/]",
        )
    return found


def counts(row: dict, name: str) -> str:
    """Medians over pairs, the challenger's first; empty where they were not counted."""
    found = [row[f"{name}_{role}"] for role in ("challenger", "baseline")]
    return "" if None in found else "{:g} / {:g}".format(*found)


def spread(row: dict, name: str) -> str:
    low, high = row[f"{name}_ratio_min"], row[f"{name}_ratio_max"]
    return f"{row[f'{name}_ratio']:.2f}x ({low:.2f}-{high:.2f})"
