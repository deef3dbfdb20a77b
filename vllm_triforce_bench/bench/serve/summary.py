"""One row for each cell and server, from the runs: medians of ratios, and their spread."""

import numpy

from vllm_triforce_bench.bench.grid import CELL, Pairs, pairs_by_row, spread
from vllm_triforce_bench.bench.methods import CONTROL, STOCK

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
    "throughput": "tokens/s",
    "tpot": "time per output token",
    "ttft": "time to first token",
    "latency": "whole answer",
}
COUNTS = ("steps", "preemptions")
FASTER, SLOWER, EVEN = "faster", "slower", "even"
# Without a control, ratios this close to 1 are even.
_UNCONTROLLED = 0.03


def summarize(records: list[dict]) -> list[dict]:
    """Make the rows.

    A ratio is a server's figure over stock vLLM's of the same pair: more is better for throughput,
    less for times. The row has median, minimum and maximum over repetitions.
    """
    rows = [row | _row(pairs) for row, pairs in pairs_by_row(records) if row["method"] != STOCK]
    controls = {_cell(row): row for row in rows if row["method"] == CONTROL}
    for row in rows:
        row["verdict"] = _verdict(row, controls.get(_cell(row)))
    return rows


def _cell(row: dict) -> tuple:
    return tuple(row[name] for name in CELL)


def _row(pairs: Pairs) -> dict:
    row: dict = {"pairs": len(pairs), "requests": pairs[0][1]["result"]["completed"]}
    for name, figure in METRICS.items():
        stock, other = ([run["result"][figure] for run in runs] for runs in zip(*pairs))
        # A client without time reads all tokens of a short answer at once.
        ratios = [b / a for a, b in zip(stock, other) if a and b] or [numpy.nan]
        row |= spread(f"{name}_ratio", ratios)
        row[f"{name}_stock"], row[name] = float(numpy.median(stock)), float(numpy.median(other))
    for name in COUNTS:
        for column, runs in zip((f"{name}_stock", name), zip(*pairs)):
            row[column] = float(numpy.median([run[name] for run in runs]))
    lengths = [run["result"].get("spec_decode_acceptance_length") for _, run in pairs]
    lengths = [length for length in lengths if length]
    row["mean_acceptance_length"] = float(numpy.median(lengths)) if lengths else None
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
