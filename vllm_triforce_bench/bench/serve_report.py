"""Rows and page of servers: medians of ratios over the runs, and their spread."""

import operator

import numpy

from vllm_triforce_bench.bench import report
from vllm_triforce_bench.bench.grid import CELL, Pairs, pairs_by_row, spread
from vllm_triforce_bench.bench.methods import CONTROL, STOCK
from vllm_triforce_bench.bench.report import number_cell, ratio_cell
from vllm_triforce_bench.page import Cell, Page

# Figures of `vllm bench serve` by their names here; more is better for the first alone.
METRICS = {
    "throughput": "output_throughput",
    "tpot": "median_tpot_ms",
    "ttft": "median_ttft_ms",
    "latency": "median_e2el_ms",
    "p99_tpot": "p99_tpot_ms",
    "p99_ttft": "p99_ttft_ms",
}
COUNTS = ("steps", "preemptions")
FASTER, SLOWER, EVEN = "faster", "slower", "even"
# Without a control, ratios this close to 1 are even.
_UNCONTROLLED = 0.03
_SPREAD = " Medians over repetitions, with the least and the greatest."
_BELOW = " Below the line is faster." + _SPREAD
# Names and notes of the metrics that the page shows.
_SHOWN = {
    "throughput": (
        "tokens/s",
        "Generated tokens over the time from the first request to the last answer, reading prompts "
        "included. Above the line is faster." + _SPREAD,
    ),
    "tpot": (
        "time per output token",
        "Median over requests of the time between tokens after the first." + _BELOW,
    ),
    "ttft": ("time to first token", "Median over requests." + _BELOW),
    "latency": (
        "whole answer",
        "Median over requests of the time to the last token. Requests that begin together stay "
        "together with stock vLLM, their prompts read in one step: a late first token, then none "
        "that waits for another's prompt. Where some gain more than others they part." + _BELOW,
    ),
}
_READING = (
    "Name: requests under way x tokens of their prompts. The server / stock vLLM, medians over "
    "repetitions, then the median of their ratios, the least and the greatest. Length: mean "
    "acceptance length. Faster and slower: the median of tokens/s lies outside all ratios that "
    "stock vLLM against itself had in this cell; without a control, by more than 3 %."
)
TERMINAL_COLUMNS = (
    *("", "tokens/s ratio", "time per output token ratio", "time to first token ratio"),
    *("whole answer ratio", "length", *COUNTS, "verdict"),
)


def summarize(records: list[dict]) -> list[dict]:
    """Make one row for each cell and server.

    A ratio is a server's figure over stock vLLM's of the same pair: more is better for throughput,
    less for times. The row has median, minimum and maximum over repetitions.
    """
    cell = operator.itemgetter(*CELL)
    rows = [row | _row(pairs) for row, pairs in pairs_by_row(records) if row["method"] != STOCK]
    controls = {cell(row): row for row in rows if row["method"] == CONTROL}
    for row in rows:
        row["verdict"] = _verdict(row, controls.get(cell(row)))
    return rows


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


def make_page(results: dict) -> Page:
    return report.make_page(
        results,
        title="Serving",
        figures_of={
            f"{metric}_ratio": (name[0].upper() + name[1:], note)
            for metric, (name, note) in _SHOWN.items()
        },
        line=line,
        reading=_READING,
    )


def line(row: dict) -> dict[str, Cell]:
    cells = {"": Cell(row["label"], kind="")}
    for metric, (name, _) in _SHOWN.items():
        unit = "" if metric == "throughput" else " ms"
        cells[name] = Cell(f"{row[metric]:.1f} / {row[f'{metric}_stock']:.1f}{unit}")
        cells[f"{name} ratio"] = ratio_cell(row, f"{metric}_ratio", metric == "throughput")
    kind = {SLOWER: "different", FASTER: "identical"}.get(row["verdict"], "")
    return {
        **cells,
        "length": number_cell(row["mean_acceptance_length"], ".2f"),
        **{name: Cell(f"{row[name]:g} / {row[f'{name}_stock']:g}") for name in COUNTS},
        "pairs": Cell(f"{row['pairs']}"),
        "verdict": Cell(row["verdict"], kind=kind),
    }
