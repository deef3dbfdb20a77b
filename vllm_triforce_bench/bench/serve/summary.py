"""One row for each contest and cell, from the runs: medians of ratios, and their spread."""

from collections import defaultdict

import numpy

from vllm_triforce_bench.bench.report import spread
from vllm_triforce_bench.bench.serve.cells import Cell
from vllm_triforce_bench.bench.serve.schedule import paired
from vllm_triforce_bench.bench.serve.settings import CONTROL, STOCK

CELL = list(Cell.__dataclass_fields__)
# Figures of `vllm bench serve` by their names here; more is better for the first alone.
METRICS = {
    "throughput": "output_throughput",
    "tpot": "median_tpot_ms",
    "ttft": "median_ttft_ms",
    "latency": "median_e2el_ms",
    "p99_tpot": "p99_tpot_ms",
    "p99_ttft": "p99_ttft_ms",
}
SHOWN = {
    "throughput": "output tokens/s",
    "tpot": "time per output token",
    "ttft": "time to first token",
    "latency": "whole answer",
}
COUNTS = ("steps", "preemptions")
FASTER, SLOWER, EVEN = "faster", "slower", "even"
# Without a control, ratios this close to 1 are even.
_UNCONTROLLED = 0.03


def summarize(records: list[dict]) -> list[dict]:
    """Make the rows, in the order of cells, and of contests as they ran.

    A ratio is the challenger's figure over the baseline's of the same pair: more is better for
    throughput, less for times. The row has median, minimum and maximum over pairs.
    """
    by_contest: dict[tuple, list[tuple[dict, dict]]] = defaultdict(list)
    for baseline, challenger in paired(records):
        by_contest[baseline["cell_index"], baseline["contest"]].append((baseline, challenger))
    contests = list(dict.fromkeys(contest for _, contest in by_contest))
    order = sorted(by_contest, key=lambda key: (key[0], contests.index(key[1])))
    rows = [_row(by_contest[key]) for key in order]
    controls = {row["cell_index"]: row for row in rows if row["contest"] == f"{CONTROL}/{STOCK}"}
    for row in rows:
        row["verdict"] = _verdict(row, controls.get(row["cell_index"]))
    return rows


def _row(pairs: list[tuple[dict, dict]]) -> dict:
    first, challenger = pairs[0]
    row: dict = {name: first[name] for name in ["cell_index", *CELL, "contest"]}
    row |= {
        "baseline": first["label"],
        "challenger": challenger["label"],
        "challenger_name": challenger["server"],
        "pairs": len(pairs),
        "requests": first["requests"],
    }
    for name, figure in METRICS.items():
        before = [baseline["result"][figure] for baseline, _ in pairs]
        after = [run["result"][figure] for _, run in pairs]
        # A client without time reads all tokens of a short answer at once.
        ratios = [b / a for a, b in zip(before, after) if a and b] or [numpy.nan]
        row |= spread(f"{name}_ratio", ratios)
        row |= {
            f"{name}_baseline": float(numpy.median(before)),
            f"{name}_challenger": float(numpy.median(after)),
        }
    for name in COUNTS:
        for role, runs in zip(("baseline", "challenger"), zip(*pairs)):
            # Older runs have no counts.
            counts = [run[name] for run in runs if name in run]
            row[f"{name}_{role}"] = float(numpy.median(counts)) if counts else None
    for half in (0, 1):
        ratios = [
            challenger["result"]["output_throughput"] / baseline["result"]["output_throughput"]
            for baseline, challenger in pairs
            if baseline["half"] == half
        ]
        # The other server started first in the other half.
        row[f"throughput_ratio_half_{half}"] = float(numpy.median(ratios)) if ratios else None
    lengths = [run["result"].get("spec_decode_acceptance_length") for _, run in pairs]
    lengths = [length for length in lengths if length]
    row["mean_acceptance_length"] = float(numpy.median(lengths)) if lengths else None
    runs = [run for pair in pairs for run in pair]
    row["idle_server_cpu_share"] = sum(run["idle_server_cpu_seconds"] for run in runs) / sum(
        run["result"]["duration"] for run in runs
    )
    return row


def _verdict(row: dict, control: dict | None) -> str:
    """Judge the throughput: faster or slower if the median lies outside all of the control's.

    Without a control, and for the control itself, if it differs from 1 by a few percent.
    """
    low, high = 1 - _UNCONTROLLED, 1 + _UNCONTROLLED
    if control is not None and control is not row:
        low = min(1.0, control["throughput_ratio_min"])
        high = max(1.0, control["throughput_ratio_max"])
    ratio = row["throughput_ratio"]
    return SLOWER if ratio < low else FASTER if ratio > high else EVEN


def cell_of(row: dict) -> Cell:
    return Cell(**{name: row[name] for name in CELL})
