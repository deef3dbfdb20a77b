"""Terminal, CSV, JSON, figures and one page of HTML from the rows of a run."""

import base64
import dataclasses
import html
import io
import json
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from vllm_triforce_bench.lab.figures import draw
from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.lab.summary import Table, needle_found, tables


def save_rows(rows: list[dict], folder: Path) -> pd.DataFrame:
    """Writes ``rows.csv``: a line per replay."""
    frame = pd.DataFrame(rows)
    frame.to_csv(folder / "rows.csv", index=False)
    return frame


def show(frame: pd.DataFrame, console: Console) -> None:
    for table in tables(frame):
        shown = rich_table(table)
        width = console.measure(shown).maximum
        console.print(f"\n{table.title}")
        # In a file lines may be long, so that the table can be pasted.
        console.print(shown, width=None if console.is_terminal else width, crop=False)
    if found := needle_found(frame):
        console.print(found, soft_wrap=True)


def rich_table(table: Table) -> RichTable:
    """A table that can be pasted into Markdown."""
    shown = RichTable(box=box.MARKDOWN)
    shown.add_column("policy", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for value in table.values:
        shown.add_column(str(value), justify="right", no_wrap=True)
    for policy in table.policies:
        for measure, name in table.measures.items():
            cells = [table.cell(policy, value, measure) for value in table.values]
            shown.add_row(policy, name, *cells)
    return shown


def write(
    frame: pd.DataFrame, settings: LabSettings, facts: dict[str, str], folder: Path
) -> list[Path]:
    """Writes ``results.json``, a PNG for every table, and ``report.html``, which holds them all.

    Args:
        facts: the model and the machine, for the heads of the JSON and of the page.

    Returns:
        The files written.
    """
    written = [folder / "rows.csv", folder / "results.json"]
    asked = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    document = dict(settings=asked, facts=facts, rows=json.loads(frame.to_json(orient="records")))
    written[-1].write_text(json.dumps(document, indent=1))
    sections = []
    for table in tables(frame):
        picture = io.BytesIO()
        draw(table, settings).savefig(picture, format="png", dpi=130)
        written.append(folder / f"{table.name}.png")
        written[-1].write_bytes(picture.getvalue())
        sections.append(_section(table, picture.getvalue()))
    written.append(folder / "report.html")
    written[-1].write_text(_page(sections, asked, facts, needle_found(frame)))
    return written


def _section(table: Table, picture: bytes) -> str:
    head = "".join(f"<th>{value}</th>" for value in table.values)
    body = "".join(
        f"<tr><td>{policy}</td><td>{name}</td>"
        + "".join(f"<td>{table.cell(policy, value, measure)}</td>" for value in table.values)
        + "</tr>"
        for policy in table.policies
        for measure, name in table.measures.items()
    )
    title = html.escape(table.title)
    data = base64.b64encode(picture).decode()
    return (
        f"<h2>{title}</h2><img alt='{title}' src='data:image/png;base64,{data}'>"
        f"<table><tr><th>policy</th><th></th>{head}</tr>{body}</table>"
    )


def _page(sections: list[str], asked: dict, facts: dict[str, str], found: str | None) -> str:
    listed = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in {**facts, **asked}.items()
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>Acceptance lab: {html.escape(asked["model"])}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; }}
img {{ max-width: 100%; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-size: 13px; }}
td, th {{ border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; }}
td:first-child, th:first-child, td:nth-child(2) {{ text-align: left; }}
</style>
<h1>Acceptance lab: {html.escape(asked["model"])}</h1>
<p>How often a token that reads a budget of the KV cache is the token that the full cache gives.
<b>Greedy agreement</b>: same most probable token. <b>Acceptance</b>: the chance that speculative
sampling accepts it, at temperature {asked["temperature"]} and top-p {asked["top_p"]}.
<b>Attention kept</b>: the share of full attention that falls on the tokens read. Means over the
stretches of text, plus or minus half the distance of the extremes.</p>
<p>{html.escape(found or "")}</p>
{"".join(sections)}
<h2>The run</h2><table>{listed}</table></html>
"""
