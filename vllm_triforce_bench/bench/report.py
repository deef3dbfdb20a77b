"""Files of a report, and facts of the machine."""

import csv
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import vllm_triforce
from vllm_triforce_bench.page import Page


def machine() -> dict[str, str]:
    """Facts that measurements must share to be compared."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    return {
        "vllm-triforce": vllm_triforce.__version__,
        "commit": _commit(),
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


def _commit() -> str:
    """Return the commit of this package, if it is a checkout's."""
    root = Path(vllm_triforce.__file__).parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "that of the version"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_reports(folder: Path, results: dict, page: Page) -> None:
    """Write the files; ``results`` is the content of results.json."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    rows = list(map(_flat, results["rows"]))
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        for row in rows:
            # A missing figure is NaN: an empty cell, as spreadsheets and pandas read it.
            writer.writerow({name: "" if value != value else value for name, value in row.items()})
    (folder / "report.html").write_text(page.render())


def _flat(row: dict) -> dict:
    """Flatten a row: a column for each part of a step and each position."""
    columns: dict = {}
    for name, value in row.items():
        if isinstance(value, list):
            value = dict(enumerate(value, 1))
        columns |= (
            {f"{name} {k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return columns
