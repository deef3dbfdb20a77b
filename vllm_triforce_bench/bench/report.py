"""Page, terminal table and files of both benchmarks, and facts of the machine."""

import datetime
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pandas
import torch
import vllm
from cpuinfo import get_cpu_info  # vLLM needs it
from rich import box
from rich.table import Table as TerminalTable
from vllm.platforms import current_platform

import vllm_triforce
from vllm_triforce_bench.bench import figures
from vllm_triforce_bench.bench.grid import batch_text
from vllm_triforce_bench.bench.settings import METHOD_OPTIONS
from vllm_triforce_bench.colours import shade
from vllm_triforce_bench.page import Article, Cell, Page, Table, short_name

Line = Callable[[dict], dict[str, Cell]]
"""Makes the cells of a row, by the title of their column."""
_SYNTHETIC_NOTE = (
    "Acceptances are synthetic: tokens of level 1, and drafts of vLLM's methods, are accepted with "
    "probability {:g}, tokens of level 2 with {:g}, whatever the models say. Outputs are no "
    "model's, and were not compared."
)
_TERMINAL_STYLES = {"identical": "green", "tie": "yellow", "different": "bold red"}


def make_page(
    results: dict,
    *,
    title: str,
    figures_of: Mapping[str, tuple[str, str]],
    line: Line,
    reading: str,
    alarms: Sequence[str] = (),
    more_notes: Sequence[str] = (),
) -> Page:
    """Make the page from the content of results.json.

    Args:
        figures_of: titles and notes of the figures of a section, by column of the ratio.
        reading: note of the table of all cells.
    """
    rows, settings, run = results["rows"], results["settings"], dict(results["environment"])
    sections = {}
    for dtype, temperature in dict.fromkeys((row["dtype"], row["temperature"]) for row in rows):
        here = [row for row in rows if (row["dtype"], row["temperature"]) == (dtype, temperature)]
        sampled = f"T={temperature:g}, top-p {settings['top_p']:g}"
        name = f"{dtype}, {'greedy' if not temperature else sampled}"
        sections[name] = [
            Article(text, note, figures.ratios(here, column, f"{column}-{dtype}-{temperature:g}"))
            for column, (text, note) in figures_of.items()
        ]
    sections["All cells"] = [Article("", reading, table=cells_table(rows, line))]
    notes = [f"Left out: {name}. {reason}." for name, reason in results["left_out"].items()]
    if (rates := settings["synthetic_acceptances"]) is not None:
        title += " at synthetic acceptances"
        notes.insert(0, _SYNTHETIC_NOTE.format(*rates))
    draft = settings["draft"]
    facts = [
        f"target {short_name(settings['target'])}",
        f"draft {short_name(draft)}" if draft else "no draft: prompt lookup",
        f"{run['device']}, {run['cores']} cores",
        f"vLLM {run['vLLM']}",
        run["date"],
    ]
    command = run.pop("command")
    run |= {
        "tokens generated": settings["tokens"],
        "repetitions": f"{settings['repetitions']}, each of other prompts",
        "seed": settings["seed"],
        "prompts": settings["prompts"] or f"vLLM's dataset {settings['dataset_name']}",
        "engine arguments": settings["engine_keys"] or "vLLM's defaults",
        "method keys": {name: settings[name] for name in METHOD_OPTIONS if settings[name]}
        or "the benchmark's defaults",
    }
    return Page(
        title=f"{title}: {short_name(settings['target'])}",
        heading=f"{title} against stock vLLM",
        facts=facts,
        sections=sections,
        notes=[*notes, *more_notes],
        run=run,
        command=command,
        alarms=alarms,
    )


def cell_name(row: dict) -> str:
    batch = batch_text(row["batch_size"], row["context"])
    return f"{batch}, T={row['temperature']:g}, {row['dtype']}"


def ratio_cell(row: dict, column: str, more_is_better: bool = True) -> Cell:
    ratio, low, high = (row[f"{column}{end}"] for end in ("", "_min", "_max"))
    colour = shade(ratio if more_is_better else 1 / ratio)
    return Cell(f"{ratio:.2f}x", f"{low:.2f} to {high:.2f}", colour=colour)


def number_cell(value: float | None, form: str) -> Cell:
    """Make the cell of a figure; empty without one."""
    return Cell("" if value is None else format(value, form))


def cells_table(rows: Sequence[dict], line: Line) -> Table:
    """Make the table of all rows, each below the name of its cell."""
    # Headers of numbers stand right; the other kinds are of one cell alone.
    columns = [Cell(name, kind="n" * (c.kind == "n")) for name, c in line(rows[0]).items()]
    lines: list[str | Sequence[Cell]] = []
    for cell, here in itertools.groupby(rows, cell_name):
        lines += [cell, *(list(line(row).values()) for row in here)]
    return Table(columns, lines)


def terminal_table(rows: Sequence[dict], line: Line, columns: Sequence[str]) -> TerminalTable:
    table, first = TerminalTable(box=box.SIMPLE, pad_edge=False), line(rows[0])
    for name in columns:
        table.add_column(name, justify="right" if first[name].kind == "n" else "left")
    for cell, here in itertools.groupby(rows, cell_name):
        table.add_section()
        table.add_row(f"[bold]{cell}")
        for row in here:
            texts = []
            for its in (line(row)[name] for name in columns):
                text = f"{its.text} ({its.small})" if its.small else its.text
                style = _TERMINAL_STYLES.get(its.kind)
                texts.append(f"[{style}]{text}[/]" if style else text)
            table.add_row(*texts)
    return table


def machine() -> dict[str, str]:
    """Facts that measurements must share to be compared."""
    root, commit = Path(vllm_triforce.__file__).parents[1], "that of the version"
    if (root / ".git").exists() and shutil.which("git"):  # a checkout
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "vllm-triforce": vllm_triforce.__version__,
        "commit": commit,
        "vLLM": vllm.__version__,
        "device": get_cpu_info().get("brand_raw", platform.machine())
        if current_platform.is_cpu()
        else torch.cuda.get_device_name(),
        "cores": f"{len(os.sched_getaffinity(0))}",
    }


def environment(argv: list[str]) -> dict[str, str]:
    """Facts of the run ``vllm-triforce ARGV``, in the order of the page."""
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
        **machine(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "Python": platform.python_version(),
        "threads of torch": f"{torch.get_num_threads()}",
        "load when it ended": f"{os.getloadavg()[0]:.2f}",
        "preloaded": " ".join(Path(path).name for path in preloaded if path) or "nothing",
        "command": shlex.join(["vllm-triforce", *argv]),
    }


def write_reports(folder: Path, results: dict, page: Page) -> None:
    """Write the files; ``results`` is the content of results.json."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    # A column for each part of a step and each position.
    rows = [
        {name: dict(enumerate(v, 1)) if isinstance(v, list) else v for name, v in row.items()}
        for row in results["rows"]
    ]
    frame = pandas.json_normalize(rows, sep=" ").convert_dtypes()
    frame.to_csv(folder / "results.csv", index=False)
    (folder / "report.html").write_text(page.render())
