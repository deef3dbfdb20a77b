"""Terminal, CSV, JSON, figures and a page, from the rows of a run."""

import base64
import html
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from vllm_triforce_bench import page
from vllm_triforce_bench.lab.settings import VARIED, LabSettings

MEASURES = {
    "greedy_agreement": "greedy agreement",
    "acceptance": "acceptance",
    "kept_mass": "attention kept",
}
_MEANING = (
    "How often a token that reads a budget of the KV cache is the token that the full cache gives. "
    "Greedy agreement: same most probable token. Acceptance: the chance that speculative sampling "
    "accepts it, at temperature {temperature:g} and top-p {top_p:g}. Attention kept: the share of "
    "full attention that falls on the tokens read. Means over the stretches of text, plus or minus "
    "half the distance of the extremes."
)


@dataclass(frozen=True)
class Table:
    """One experiment, at one budget unless it varies the budget.

    Args:
        figures: mean, min, max and count over the stretches of each measure, by policy and varied
            value.
    """

    experiment: str
    budget: int | None
    label: str
    figures: pd.DataFrame

    @property
    def name(self) -> str:
        return self.experiment if self.budget is None else f"{self.experiment}-{self.budget}"

    @property
    def title(self) -> str:
        at = "" if self.budget is None else f", budget {self.budget}"
        return f"By {self.label}{at}"

    @property
    def policies(self) -> list[str]:
        return list(self.figures.index.unique(0))

    @property
    def values(self) -> list[int]:
        return sorted(self.figures.index.unique(1))

    def lines(self) -> Iterator[list[str]]:
        """Yield a policy, a measure, and the cells of each measure's line."""
        for policy in self.policies:
            for measure, name in MEASURES.items():
                # A column a value; a policy may lack some.
                part = self.figures.loc[policy][measure].reindex(self.values)
                yield [policy, name, *(_cell(*row) for row in part.itertuples(index=False))]


def _cell(mean: float, low: float, high: float, count: float) -> str:
    """Format the mean over stretches, plus or minus half the range if there are several."""
    if mean != mean:
        return ""
    return f"{mean:.3f}" if count == 1 else f"{mean:.3f} ±{(high - low) / 2:.3f}"


def tables(rows: pd.DataFrame) -> list[Table]:
    run_tables = []
    for experiment, (column, label) in VARIED.items():
        part = rows[rows["experiment"] == experiment]
        # By one budget each, but for the experiment that varies it.
        groups = [(None, part)] if column == "budget" else part.groupby("budget")
        for budget, chosen in groups:
            if not chosen.empty:
                by = chosen.groupby(["policy", column], sort=False)[list(MEASURES)]
                figures = by.agg(["mean", "min", "max", "count"])
                run_tables.append(Table(experiment, budget, label, figures))
    return run_tables


def save_rows(rows: list[dict], folder: Path) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    frame.to_csv(folder / "rows.csv", index=False)
    return frame


def show(frame: pd.DataFrame, console: Console) -> None:
    """Print the tables, so that they can be pasted into Markdown."""
    for table in tables(frame):
        rich_table = RichTable(box=box.MARKDOWN)
        for name in ("policy", ""):
            rich_table.add_column(name, no_wrap=True)
        for value in table.values:
            rich_table.add_column(str(value), justify="right", no_wrap=True)
        for line in table.lines():
            rich_table.add_row(*line)
        console.print(f"\n{table.title}")
        # Lines of a file may be long.
        width = None if console.is_terminal else console.measure(rich_table).maximum
        console.print(rich_table, width=width, crop=False)


def write(
    frame: pd.DataFrame, settings: LabSettings, facts: dict[str, str], folder: Path
) -> list[Path]:
    """Write ``results.json``, a PNG for every table, and ``report.html``; return all files."""
    values = json.loads(json.dumps(asdict(settings), default=str))
    document = dict(settings=values, facts=facts, rows=json.loads(frame.to_json(orient="records")))
    written = [folder / "rows.csv", folder / "results.json"]
    written[-1].write_text(json.dumps(document, indent=1))
    articles = []
    for table in tables(frame):
        picture = io.BytesIO()
        draw(table, settings).savefig(picture, format="png", dpi=130)
        written.append(folder / f"{table.name}.png")
        written[-1].write_bytes(picture.getvalue())
        data, caption = base64.b64encode(picture.getvalue()).decode(), html.escape(table.title)
        image = f"data:image/png;base64,{data}"
        shown = f"<img alt='{caption}' style='max-width:100%' src='{image}'>"
        values_of = [page.Cell(str(value)) for value in table.values]
        columns = [page.Cell("policy", kind=""), page.Cell(kind=""), *values_of]
        lines = [
            [page.Cell(policy, kind=""), page.Cell(name, kind=""), *map(page.Cell, cells)]
            for policy, name, *cells in table.lines()
        ]
        articles.append(page.Article(table.title, "", shown, page.Table(columns, lines)))
    title = f"Acceptance lab: {settings.model}"
    report = page.Page(
        title=title,
        heading=title,
        facts=list(facts.values()),
        notes=[_MEANING.format(temperature=settings.temperature, top_p=settings.top_p)],
        sections={"Tables": articles},
        run={**facts, **values},
    )
    written.append(folder / "report.html")
    written[-1].write_text(report.render())
    return written


def draw(table: Table, settings: LabSettings) -> Figure:
    """Draw a panel for each measure: a line for each policy, a band over the stretches."""
    figure = Figure(figsize=(4.2 * len(MEASURES), 3.7), layout="constrained")
    axes = figure.subplots(1, len(MEASURES))
    for axis, (measure, name) in zip(axes, MEASURES.items()):
        for policy in table.policies:
            part = table.figures.loc[policy][measure].sort_index()
            (line,) = axis.plot(part.index, part["mean"], marker="o", label=policy)
            axis.fill_between(
                part.index, part["min"], part["max"], color=line.get_color(), alpha=0.12, lw=0
            )
        if measure == "acceptance":
            name = f"acceptance, T={settings.temperature:g}, top-p {settings.top_p:g}"
        axis.set_title(name, fontsize=11)
        axis.set_xlabel(table.label, fontsize=9)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(table.values))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(
            lambda at, _: f"{at / 1024:g}K" if at >= 1024 and at % 1024 == 0 else f"{at:g}"
        )
        axis.tick_params(labelsize=8)
        axis.set_ylim(top=1.005)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, loc="best")
    figure.suptitle(table.title, fontsize=12)
    return figure
