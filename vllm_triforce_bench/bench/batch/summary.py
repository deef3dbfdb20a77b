"""One row for each cell and variant, from the records: medians and spreads."""

from collections import defaultdict
from typing import Any

import numpy
from scipy.stats import bootstrap

from vllm_triforce_bench.bench.grid import Pairs, pairs_by_row, spread

REST = "full pass and vLLM"
"""The part of a step outside ``propose()``."""
LEAST_RESAMPLED = 5
"""Fewer repetitions say nothing about the spread of their mean."""
_LEVEL_COUNTS = (
    "num_level1_drafted",
    "num_level1_accepted",
    "num_level2_drafted",
    "num_level2_accepted",
    "num_level3_rejections",
)


def summarize(records: list[dict]) -> list[dict]:
    """Make the rows.

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
    """Ratio of the tokens per second of all repetitions, which have as many tokens each.

    With five repetitions and more, its 95 % interval by resampling them.

    Args:
        stock, own: times of the repetitions.
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
    """Sums of vLLM's own statistics over repetitions."""
    stats = [record["speculation"] for record in repetitions]
    drafts = sum(each["num_drafts"] for each in stats)
    accepted = sum(each["num_accepted_tokens"] for each in stats)
    by_position: dict[int, int] = defaultdict(int)
    for each in stats:
        for position, count in enumerate(each["num_accepted_tokens_per_pos"]):
            by_position[position] += count
    return {
        # As vLLM counts: with the bonus token, over steps that verified a proposal.
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": _share(accepted, sum(e["num_draft_tokens"] for e in stats)),
        "acceptance_by_position": [n / drafts for n in by_position.values()] if drafts else [],
    }


def _levels(repetitions: list[dict]) -> dict:
    """TriForce's acceptance rates, and milliseconds of an engine step by part."""
    steps = sum(record["num_steps"] for record in repetitions)
    seconds = sum(record["seconds"] for record in repetitions)
    levels = [record["levels"] for record in repetitions if record["levels"]]
    total = {name: sum(level[name] for level in levels) for name in _LEVEL_COUNTS}
    parts: dict[str, float] = defaultdict(float)
    for level in levels:
        for part, part_s in level["time_seconds"].items():
            parts[part] += part_s
    parts[REST] = max(0.0, seconds - sum(parts.values()))
    accepted = total["num_level2_accepted"]
    return {
        "level1_acceptance_rate": _share(total["num_level1_accepted"], total["num_level1_drafted"]),
        "level2_acceptance_rate": _share(accepted, total["num_level2_drafted"]),
        "level2_acceptance_per_test": _share(accepted, accepted + total["num_level3_rejections"]),
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
