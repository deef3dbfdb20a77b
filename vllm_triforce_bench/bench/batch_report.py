"""Rows and page of fixed batches: medians and spreads over the records of each cell."""

from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy
from scipy.stats import bootstrap

from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce_bench.bench import report
from vllm_triforce_bench.bench.grid import Pairs, pairs_by_row, spread
from vllm_triforce_bench.bench.methods import STOCK
from vllm_triforce_bench.bench.report import cell_name, number_cell, ratio_cell
from vllm_triforce_bench.page import Cell, Page

REST = "full pass and vLLM"
"""The part of a step outside ``propose()``."""
LEAST_RESAMPLED = 5
"""Fewer repetitions say nothing about the spread of their mean."""
_SPEED_UP = (
    "Decode tokens per second relative to stock vLLM on the same prompts, one right after the "
    "other: medians over repetitions, with the least and the greatest. Above the line is faster."
)
_READING = (
    "Tokens a second: of the whole batch, from the first token to the last. Ratio: median, least "
    "and greatest over repetitions. Together: the ratio of all repetitions' tokens and times, with "
    "its 95 % interval by bootstrap where there are five repetitions. TTFT: median time to the "
    "first token of a prompt that the engine does not know. ITL: time between two outputs of a "
    "request; tokens that come together count once. Length: mean acceptance length, with the bonus "
    "token. Level 1: share of its tokens that level 2 accepted. Accepted: share of proposed tokens "
    "that the full pass accepted; by position: of the steps that verified a proposal. Step: one "
    "full pass and what goes with it, and its tokens of all requests together. By part: TriForce "
    "times its own parts. Memory: on a CPU the growth of the process "
    "while the engine was made; on a GPU what the device allocated, and the peak above it in a run."
)
_CPU_NOTE = (
    "vLLM's CPU build samples wrongly with speculation; that fault is mended in the benchmark's "
    "process, for stock vLLM's own methods too."
)
TERMINAL_COLUMNS = (
    *("", "tokens/s", "ratio", "together", "TTFT ms", "ITL p50 ms", "p99 ms", "length", "greedy"),
)


def summarize(records: list[dict]) -> list[dict]:
    """Make one row for each cell and variant.

    A ratio is decode tokens per second over stock vLLM's of the same set. The row has median,
    minimum and maximum over repetitions, and the ratio of all repetitions together.
    """
    return [cell | _row(pairs) for cell, pairs in pairs_by_row(records)]


def _row(pairs: Pairs) -> dict:
    stock_speeds, speeds = (
        numpy.array([record["decode_tokens_per_second"] for record in records])
        for records in zip(*pairs)
    )
    row: dict[str, Any] = {"measurements": len(pairs)}
    row |= spread("decode_tokens_per_second", speeds.tolist())
    row |= spread("ratio", (speeds / stock_speeds).tolist())
    row |= _together(1 / stock_speeds, 1 / speeds)
    repetitions = [record for _, record in pairs]
    first = [second for record in repetitions for second in record["time_to_first_token_s"]]
    between = [second for record in repetitions for second in record["inter_token_latency_s"]]
    row["time_to_first_token_ms"] = 1e3 * float(numpy.median(first))
    for percentile in (50, 99):
        latency_s = float(numpy.percentile(between, percentile))
        row[f"inter_token_latency_p{percentile}_ms"] = 1e3 * latency_s
    row["memory_mib"] = float(numpy.median([r["memory_bytes"] for r in repetitions])) / (1 << 20)
    return row | _speculation(repetitions) | _levels(repetitions) | _greedy(repetitions)


def _together(stock: numpy.ndarray, own: numpy.ndarray) -> dict:
    """Ratio of the times of all repetitions, which have as many tokens each.

    With five repetitions and more, its 95 % interval by resampling them.
    """
    row = {"ratio_together": _ratio(stock, own), "ratio_low": None, "ratio_high": None}
    if len(own) >= LEAST_RESAMPLED:
        interval = bootstrap((stock, own), _ratio, paired=True, method="percentile", rng=0)
        row["ratio_low"], row["ratio_high"] = map(float, interval.confidence_interval)
    return row


def _ratio(stock: numpy.ndarray, own: numpy.ndarray, axis: int = -1):
    """Divide the sums of times; the last axis is of repetitions."""
    return stock.sum(axis) / own.sum(axis)


def _speculation(repetitions: list[dict]) -> dict:
    stats = [record["speculation"] for record in repetitions]
    drafts = sum(each["num_drafts"] for each in stats)
    accepted = sum(each["num_accepted_tokens"] for each in stats)
    positions = (each["num_accepted_tokens_per_pos"] for each in stats)
    by_position = map(sum, zip_longest(*positions, fillvalue=0))
    return {
        # As vLLM counts: with the bonus token, over steps that verified a proposal.
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": _share(accepted, sum(e["num_draft_tokens"] for e in stats)),
        "acceptance_by_position": [n / drafts for n in by_position] if drafts else [],
    }


def _levels(repetitions: list[dict]) -> dict:
    """TriForce's acceptance rates, and milliseconds of an engine step by part."""
    steps = sum(record["num_steps"] for record in repetitions)
    seconds = sum(record["seconds"] for record in repetitions)
    counters = (LevelCounters(**record["levels"]) for record in repetitions if record["levels"])
    total = reduce(LevelCounters.plus, counters, LevelCounters())
    parts = dict(total.time_seconds)
    parts[REST] = max(0.0, seconds - sum(parts.values()))
    accepted, rejected = total.num_level2_accepted, total.num_level3_rejections
    return {
        "level1_acceptance_rate": _share(total.num_level1_accepted, total.num_level1_drafted),
        "level2_acceptance_rate": _share(accepted, total.num_level2_drafted),
        "level2_acceptance_per_test": _share(accepted, accepted + rejected),
        "tokens_per_step": sum(record["num_tokens"] for record in repetitions) / steps,
        "step_ms": 1e3 * seconds / steps,
        "step_parts_ms": {part: 1e3 * part_s / steps for part, part_s in parts.items()},
        "time_shares": {part: part_s / seconds for part, part_s in parts.items()},
    }


def _greedy(repetitions: list[dict]) -> dict:
    verdicts = [record["greedy"] for record in repetitions if record["greedy"]]
    outcomes = [verdict["outcome"] for verdict in verdicts]
    worst = next((o for o in ("different", "tie", "identical") if o in outcomes), None)
    margins = [verdict["margin"] for verdict in verdicts if verdict["margin"] is not None]
    return {"greedy": worst, "greedy_margin": max(margins, default=None)}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def make_page(results: dict) -> Page:
    rows = results["rows"]
    return report.make_page(
        results,
        title="Decode speed",
        figures_of={"ratio": ("Speed-up by context and batch", _SPEED_UP)},
        line=line,
        reading=_READING,
        alarms=[
            f"Greedy output differs from stock vLLM's: {row['label']}, {cell_name(row)}."
            for row in rows
            if row["greedy"] == "different"
        ],
        more_notes=[_CPU_NOTE] if any(results["settings"]["temperatures"]) else [],
    )


def line(row: dict) -> dict[str, Cell]:
    low, high = row["ratio_low"], row["ratio_high"]
    interval = "" if low is None else f"{low:.2f} to {high:.2f}"
    together = Cell(f"{row['ratio_together']:.2f}x", interval)
    level2, margin, greedy = row["level2_acceptance_rate"], row["greedy_margin"], row["greedy"]
    by_position = " ".join(f"{100 * share:.0f}" for share in row["acceptance_by_position"])
    parts = row["step_parts_ms"].items()
    is_stock = row["method"] == STOCK  # without ratios to itself
    return {
        "": Cell(row["label"], kind=""),
        "tokens/s": number_cell(row["decode_tokens_per_second"], ".1f"),
        "ratio": Cell("1") if is_stock else ratio_cell(row, "ratio"),
        "together": Cell() if is_stock else together,
        "TTFT ms": number_cell(row["time_to_first_token_ms"], ".0f"),
        "ITL p50 ms": number_cell(row["inter_token_latency_p50_ms"], ".1f"),
        "p99 ms": number_cell(row["inter_token_latency_p99_ms"], ".1f"),
        "length": number_cell(row["mean_acceptance_length"], ".2f"),
        "level 1": number_cell(row["level1_acceptance_rate"], ".0%"),
        "accepted": number_cell(row["draft_acceptance_rate"] if level2 is None else level2, ".0%"),
        "by position, %": Cell(by_position),
        "step": Cell(f"{row['step_ms']:.1f} ms", f"{row['tokens_per_step']:.1f} tokens"),
        "ms by part": Cell(", ".join(f"{part} {ms:.1f}" for part, ms in parts), kind=""),
        "memory": Cell(f"{row['memory_mib']:,.0f} MiB"),
        "greedy": Cell(
            greedy or "", "" if margin is None else f"margin {margin:.2g}", kind=greedy or ""
        ),
    }
