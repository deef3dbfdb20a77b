"""Files of a report: results.json, results.csv and the page; and facts of the machine."""

import csv
import datetime
import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy

from vllm_triforce_bench.bench.settings import EACH
from vllm_triforce_bench.page import Page, short_name


def machine() -> dict[str, str]:
    """Facts that measurements must share to be compared."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    import vllm_triforce

    return {
        "vllm-triforce": vllm_triforce.__version__,
        "vLLM": vllm.__version__,
        "device": _cpu_name() if current_platform.is_cpu() else torch.cuda.get_device_name(),
        "cores": f"{len(os.sched_getaffinity(0))}",
    }


def environment(argv: list[str]) -> dict[str, str]:
    """Facts of the run, in the order of the page.

    Args:
        argv: arguments of ``vllm-triforce``.
    """
    import torch

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


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_reports(folder: Path, results: dict, csv_rows: Sequence[dict], page: Page) -> None:
    """Write the files.

    Args:
        results: content of results.json.
        csv_rows: its rows, flat.
    """
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in csv_rows for name in row)))
        writer.writeheader()
        for row in csv_rows:
            # A missing figure is NaN: an empty cell, as spreadsheets and pandas read it.
            writer.writerow({name: "" if value != value else value for name, value in row.items()})
    (folder / "report.html").write_text(page.render())


def facts_of(results: dict, more: Mapping[str, Any]) -> dict[str, Any]:
    """Make the fields of a page that describe its run.

    Args:
        more: further rows of the last table.
    """
    settings, run = results["settings"], dict(results["environment"])
    draft = settings["draft"]
    facts = [
        f"target {short_name(settings['target'])}",
        f"draft {short_name(draft)}" if draft else "no draft: prompt lookup",
        f"{run['device']}, {run['cores']} cores",
        f"vLLM {run['vLLM']}",
        run["date"],
    ]
    return {"facts": facts, "command": run.pop("command"), "run": {**run, **more}}


def ratio_cards(
    rows: Sequence[dict],
    column: str,
    median_of: str,
    name: Callable[[dict], str],
    is_slow: Callable[[dict], bool],
) -> list[tuple[str, str, str]]:
    """Make the cards of the median ratio, the best and the worst.

    Args:
        name: names the cell of a row.
    """
    median = float(numpy.median([row[column] for row in rows]))
    best, worst = (choose(rows, key=lambda row: row[column]) for choose in (max, min))
    return [
        (f"{median:.2f}x", f"median of {median_of}", "plain"),
        (f"{best[column]:.2f}x", f"fastest: {name(best)}", "good"),
        (f"{worst[column]:.2f}x", f"slowest: {name(worst)}", "bad" if is_slow(worst) else "plain"),
    ]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, as columns."""
    return {
        name: float(numpy.median(values)),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def batch_text(batch_size: int, context: int) -> str:
    """Name a batch by its size and the tokens of its prompts."""
    return (
        f"{batch_size} x each prompt"
        if context == EACH
        else f"{batch_size} x {tokens_text(context)} tokens"
    )


def tokens_text(tokens: int) -> str:
    if tokens == EACH:
        return "each prompt"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
