"""From runs to one row for each contest and cell: medians of ratios, and their spread."""

import numpy
import pandas

from vllm_triforce_bench.bench.serve.cells import Cell
from vllm_triforce_bench.bench.serve.settings import CONTROL, STOCK
from vllm_triforce_bench.bench.serve.store import paired

CELL = list(Cell.__dataclass_fields__)
# Figures of vLLM's `bench serve` by the name that they have here; more is better of the first.
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
_UNCONTROLLED = 0.03
"""Without a control, by how much a ratio must differ from 1 to count."""


def summarize(records: list[dict]) -> list[dict]:
    """Rows in the order of cells, and of contests as they ran.

    A ratio is the challenger's figure over the baseline's of the same pair: of throughput more is
    better, of times less is. The row has the median, the least and the greatest over pairs.
    """
    grouped: dict[tuple, list[tuple[dict, dict]]] = {}
    contests = []
    for baseline, challenger in paired(records):
        if baseline["contest"] not in contests:
            contests.append(baseline["contest"])
        key = (baseline["cell_index"], baseline["contest"])
        grouped.setdefault(key, []).append((baseline, challenger))
    order = sorted(grouped, key=lambda key: (key[0], contests.index(key[1])))
    rows = [_row(grouped[key]) for key in order]
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
        after = [found["result"][figure] for _, found in pairs]
        # A client that gets no time reads all tokens of a short answer at once.
        ratios = [b / a for a, b in zip(before, after) if a and b] or [numpy.nan]
        row |= {
            f"{name}_ratio": float(numpy.median(ratios)),
            f"{name}_ratio_min": min(ratios),
            f"{name}_ratio_max": max(ratios),
            f"{name}_baseline": float(numpy.median(before)),
            f"{name}_challenger": float(numpy.median(after)),
        }
    for name in COUNTS:
        for role, runs in zip(("baseline", "challenger"), zip(*pairs)):
            # What was measured before runs had counts has none.
            counts = [run[name] for run in runs if name in run]
            row[f"{name}_{role}"] = float(numpy.median(counts)) if counts else None
    for half in (0, 1):
        ratios = [
            found["result"]["output_throughput"] / baseline["result"]["output_throughput"]
            for baseline, found in pairs
            if baseline["half"] == half
        ]
        # Which server started first differs between the halves.
        row[f"throughput_ratio_half_{half}"] = float(numpy.median(ratios)) if ratios else None
    lengths = [found["result"].get("spec_decode_acceptance_length") for _, found in pairs]
    lengths = [length for length in lengths if length]
    row["mean_acceptance_length"] = float(numpy.median(lengths)) if lengths else None
    runs = [run for pair in pairs for run in pair]
    row["idle_server_cpu_share"] = sum(run["idle_server_cpu_seconds"] for run in runs) / sum(
        run["result"]["duration"] for run in runs
    )
    return row


def _verdict(row: dict, control: dict | None) -> str:
    """Of throughput: faster or slower where the median lies outside all that the control found.

    Without a control, and for the control itself, where it differs from 1 by a few percent.
    """
    low, high = 1 - _UNCONTROLLED, 1 + _UNCONTROLLED
    if control is not None and control is not row:
        low = min(1.0, control["throughput_ratio_min"])
        high = max(1.0, control["throughput_ratio_max"])
    ratio = row["throughput_ratio"]
    return SLOWER if ratio < low else FASTER if ratio > high else EVEN


def cell_of(row: dict) -> Cell:
    return Cell(**{name: row[name] for name in CELL})


def table(rows: list[dict]) -> pandas.DataFrame:
    """For CSV."""
    return pandas.DataFrame(rows)
