"""Page of fixed batches."""

from collections.abc import Sequence

from vllm_triforce_bench import colours
from vllm_triforce_bench.bench import page
from vllm_triforce_bench.bench.batch.summary import REST
from vllm_triforce_bench.bench.methods import STOCK
from vllm_triforce_bench.bench.page import cell_name, number_cell, ratio_cards, ratio_cell
from vllm_triforce_bench.page import Cell, Page

_SPEED_UP = (
    "Decode tokens per second relative to stock vLLM. Points are medians over repetitions, bars "
    "go from the least to the greatest; both of a ratio's measurements read the same prompts, one "
    "right after the other. Above the dashed line is faster."
)
_READING = (
    "Tokens a second: of the whole batch, from the first token to the last, reading the prompt "
    "not counted. Ratio: median, least and greatest over repetitions. Together: the ratio of all "
    "repetitions' tokens and times, with its 95 % interval by bootstrap where there are five "
    "repetitions. TTFT: median over requests of the time to the first token of a prompt that the "
    "engine does not know. ITL: time between two outputs of a request, tokens that come together "
    "counting once. Length: mean acceptance length, with the bonus token. Level 1: share of its "
    "tokens that level 2 accepted. Accepted: share of all proposed tokens that the full pass "
    "accepted. By position: of the steps that verified a proposal, the share that accepted its "
    "token at each position, as vLLM counts; a shorter proposal did not reach the later ones. "
    "Step: one full pass, and what goes with it, and the tokens that it brought to all requests "
    "together: a longer step that brings more tokens can be the faster one. By part: TriForce "
    "times its own parts; rest the pointer on them. Memory: on a CPU the growth of the process "
    "while the engine was made; on a GPU what the device allocated, and the peak above it in a run."
)
_CPU_NOTE = (
    "vLLM's CPU build samples wrongly with speculation; that fault is mended in the benchmark's "
    "process, for stock vLLM's own methods too."
)
TERMINAL_COLUMNS = (
    *("", "tokens/s", "ratio", "together", "TTFT ms", "ITL p50 ms", "p99 ms", "length", "greedy"),
)


def make_page(results: dict) -> Page:
    """Make the page from the content of results.json."""
    rows = results["rows"]
    return page.make_page(
        results,
        title="Decode speed",
        figures_of={"ratio": ("Speed-up by context and batch", _SPEED_UP)},
        line=line,
        reading=_READING,
        cards=_cards(rows),
        alarms=[
            f"Greedy output differs from stock vLLM's: {row['label']}, {cell_name(row)}."
            for row in rows
            if row["greedy"] == "different"
        ],
        run_notes=[_CPU_NOTE] if any(results["settings"]["temperatures"]) else [],
    )


def _cards(rows: Sequence[dict]) -> list[tuple[str, str, str]]:
    others = [row for row in rows if row["method"] != STOCK]
    ours = [row for row in others if row["method"] == "triforce"] or others
    if not ours:
        return []
    judged = [row["greedy"] for row in others if row["greedy"]]
    ties, different = judged.count("tie"), judged.count("different")
    greedy = f"{judged.count('identical')} of {len(judged)}" if judged else "not compared"
    note = "cells with greedy output identical to stock's"
    note += f"; {ties} part where stock itself is undecided" if ties else ""
    note += f"; {different} DIFFERENT" if different else ""
    median_of = f"{ours[0]['label']} over its {len(ours)} cells"
    return [
        *ratio_cards(ours, "ratio", median_of, lambda row: row["ratio"] < 0.97),
        (greedy, note, "bad" if different else "good" if judged else "plain"),
    ]


def line(row: dict) -> dict[str, Cell]:
    """Make the cells of a row, by the title of their column."""
    low, high = row["ratio_low"], row["ratio_high"]
    interval = "" if low is None else f"{low:.2f} to {high:.2f}"
    together = Cell(f"{row['ratio_together']:.2f}x", interval)
    level2, margin, greedy = row["level2_acceptance_rate"], row["greedy_margin"], row["greedy"]
    by_position = " ".join(f"{100 * share:.0f}" for share in row["acceptance_by_position"])
    parts = row["time_shares"].items()
    part_colours = colours.PARTS | {REST: colours.REST}
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
        "by part": Cell(
            ", ".join(f"{part} {row['step_parts_ms'][part]:.1f} ms, {s:.0%}" for part, s in parts),
            kind="",
            parts=[(share, part_colours.get(part, colours.OTHER_PART)) for part, share in parts],
        ),
        "memory": Cell(f"{row['memory_mib']:,.0f} MiB"),
        "greedy": Cell(
            greedy or "", "" if margin is None else f"margin {margin:.2g}", kind=greedy or ""
        ),
    }
