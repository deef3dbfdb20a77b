"""From measurements to one row for each cell and variant: medians and spreads."""

import numpy
import pandas

CELL = ["dtype", "context", "batch_size", "temperature"]
VARIANT = ["method", "budget", "label"]
REST = "full pass and vLLM"
"""The part of a step that is not measured inside ``propose()``."""


def summarize(records: list[dict]) -> list[dict]:
    """One row for each cell and variant; cells in order, variants as they were named.

    The ratio is of decode tokens per second to stock vLLM's of the same set (same prompts, one
    right after the other); the row has the median, the least and the greatest over repetitions.
    """
    stock = {
        _set(record): record["decode_tokens_per_second"]
        for record in records
        if record["method"] == "stock"
    }
    for record in records:
        record["ratio"] = record["decode_tokens_per_second"] / stock[_set(record)]
    grouped: dict[tuple, list[dict]] = {}
    for record in records:
        grouped.setdefault(tuple(record[name] for name in CELL + VARIANT), []).append(record)
    rows = [
        dict(zip(CELL + VARIANT, key)) | _row(repetitions) for key, repetitions in grouped.items()
    ]
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    labels = list(dict.fromkeys(record["label"] for record in records))
    rows.sort(
        key=lambda row: (
            dtypes.index(row["dtype"]),
            *(row[name] for name in CELL[1:]),
            labels.index(row["label"]),
        )
    )
    return rows


def _set(record: dict) -> tuple:
    return tuple(record[name] for name in [*CELL, "group", "repetition"])


def _row(repetitions: list[dict]) -> dict:
    row: dict = {"measurements": len(repetitions)}
    for name in ("decode_tokens_per_second", "ratio"):
        values = [record[name] for record in repetitions]
        row |= {
            name: float(numpy.median(values)),
            f"{name}_min": min(values),
            f"{name}_max": max(values),
        }
    first = [second for record in repetitions for second in record["time_to_first_token_s"]]
    between = [second for record in repetitions for second in record["inter_token_latency_s"]]
    row["time_to_first_token_ms"] = 1e3 * float(numpy.median(first))
    row["inter_token_latency_p50_ms"] = 1e3 * float(numpy.percentile(between, 50))
    row["inter_token_latency_p99_ms"] = 1e3 * float(numpy.percentile(between, 99))
    row["memory_mib"] = float(numpy.median([r["memory_bytes"] for r in repetitions])) / (1 << 20)
    row |= _outside_passes(repetitions)
    return row | _speculation(repetitions) | _levels(repetitions) | _greedy(repetitions)


def _outside_passes(repetitions: list[dict]) -> dict:
    """Medians, where passes were timed (``--pass-times``)."""
    if not all(record.get("outside_passes") for record in repetitions):
        return {}
    found = [record["outside_passes"] for record in repetitions]
    return {
        f"outside_passes_{name}": float(numpy.median([one[name] for one in found]))
        for name in found[0]
    }


def _speculation(repetitions: list[dict]) -> dict:
    """From vLLM's own statistics, summed over repetitions."""
    found = [record["speculation"] for record in repetitions]
    drafts = sum(stats["num_drafts"] for stats in found)
    drafted = sum(stats["num_draft_tokens"] for stats in found)
    accepted = sum(stats["num_accepted_tokens"] for stats in found)
    positions = max((len(stats["num_accepted_tokens_per_pos"]) for stats in found), default=0)
    by_position = [
        sum(stats["num_accepted_tokens_per_pos"][i] for stats in found if _reaches(stats, i))
        for i in range(positions)
    ]
    return {
        # As vLLM counts: with the bonus token, of steps that verified a proposal.
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_by_position": [n / drafts for n in by_position] if drafts else [],
    }


def _reaches(stats: dict, position: int) -> bool:
    return position < len(stats["num_accepted_tokens_per_pos"])


def _levels(repetitions: list[dict]) -> dict:
    """TriForce's acceptance rates, and milliseconds of an engine step by part."""
    steps = sum(record["num_steps"] for record in repetitions)
    tokens = sum(record["num_tokens"] for record in repetitions)
    seconds = sum(record["seconds"] for record in repetitions)
    levels = [record["levels"] for record in repetitions if record["levels"]]
    total = {
        name: sum(level[name] for level in levels)
        for name in (
            "num_level1_drafted",
            "num_level1_accepted",
            "num_level2_drafted",
            "num_level2_accepted",
            "num_level3_rejections",
        )
    }
    parts: dict[str, float] = {}
    for level in levels:
        for part, spent in level["time_seconds"].items():
            parts[part] = parts.get(part, 0.0) + spent
    parts[REST] = max(0.0, seconds - sum(parts.values()))
    tested = total["num_level2_accepted"] + total["num_level3_rejections"]
    return {
        "level1_acceptance_rate": _share(total["num_level1_accepted"], total["num_level1_drafted"]),
        "level2_acceptance_rate": _share(total["num_level2_accepted"], total["num_level2_drafted"]),
        "level2_acceptance_per_test": _share(total["num_level2_accepted"], tested),
        "tokens_per_step": tokens / steps,
        "step_ms": 1e3 * seconds / steps,
        "step_parts_ms": {part: 1e3 * spent / steps for part, spent in parts.items()},
        "time_shares": {part: spent / seconds for part, spent in parts.items()},
    }


def _greedy(repetitions: list[dict]) -> dict:
    verdicts = [record["greedy"] for record in repetitions if record["greedy"]]
    outcomes = [verdict["outcome"] for verdict in verdicts]
    worst = next((o for o in ("different", "tie", "identical") if o in outcomes), None)
    margins = [verdict["margin"] for verdict in verdicts if verdict["margin"] is not None]
    return {"greedy": worst, "greedy_margin": max(margins, default=None)}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def table(rows: list[dict]) -> pandas.DataFrame:
    """The rows flat, for CSV: one column for each part of a step and each position."""
    flat = []
    for row in rows:
        row = dict(row)
        for part, milliseconds in row.pop("step_parts_ms").items():
            row[f"step_ms {part}"] = milliseconds
        for part, share in row.pop("time_shares").items():
            row[f"share {part}"] = share
        for i, rate in enumerate(row.pop("acceptance_by_position")):
            row[f"accepted at position {i + 1}"] = rate
        flat.append(row)
    frame = pandas.DataFrame(flat)
    return frame.astype({"budget": "Int64"})
