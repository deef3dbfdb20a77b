"""Page of servers."""

from collections.abc import Sequence

from vllm_triforce_bench.bench import page
from vllm_triforce_bench.bench.methods import CONTROL
from vllm_triforce_bench.bench.page import number_cell, ratio_cards, ratio_cell
from vllm_triforce_bench.bench.serve.summary import COUNTS, FASTER, SHOWN, SLOWER
from vllm_triforce_bench.page import Cell, Page

_SPREAD = " Points are medians over repetitions, bars go from the least to the greatest."
_BELOW = " Below the dashed line is faster." + _SPREAD
_NOTES = {
    "throughput": "All tokens that were generated, over the time from the first request to the "
    "last answer; reading prompts included. Above the dashed line is faster." + _SPREAD,
    "tpot": "Median over requests of the time between tokens after the first." + _BELOW,
    "ttft": "Median over requests." + _BELOW,
    "latency": "Median over requests of the time to the last token. Requests of one length that "
    "begin together stay together with stock vLLM, their prompts read in one step: a late first "
    "token, then none that waits for another's prompt. Where some gain more than others they "
    "part. The whole answer tells what it comes to." + _BELOW,
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


def make_page(results: dict) -> Page:
    """Make the page from the content of results.json."""
    return page.make_page(
        results,
        title="Serving",
        figures_of={
            f"{metric}_ratio": (name[0].upper() + name[1:], _NOTES[metric])
            for metric, name in SHOWN.items()
        },
        line=line,
        reading=_READING,
        cards=_cards(results["rows"]),
    )


def _cards(rows: Sequence[dict]) -> list[tuple[str, str, str]]:
    controls = [row for row in rows if row["method"] == CONTROL]
    first = next((row["label"] for row in rows if row["method"] != CONTROL), None)
    ours = [row for row in rows if row["label"] == first]
    cards = []
    if ours:
        num_slower = [row["verdict"] for row in ours].count(SLOWER)
        judged = "slower than all that the control found" if controls else "slower by over 3 %"
        median_of = f"tokens/s over {len(ours)} cells, {first}"
        cards += [
            *ratio_cards(ours, "throughput_ratio", median_of, lambda row: row["verdict"] == SLOWER),
            (f"{num_slower} of {len(ours)}", f"cells {judged}", "bad" if num_slower else "good"),
        ]
    if controls:
        low = min(row["throughput_ratio_min"] for row in controls)
        high = max(row["throughput_ratio_max"] for row in controls)
        text = "stock vLLM against itself, over all its pairs"
        cards.append((f"{low:.2f}-{high:.2f}x", text, "plain"))
    return cards


def line(row: dict) -> dict[str, Cell]:
    """Make the cells of a row, by the title of their column."""
    cells = {"": Cell(row["label"], kind="")}
    for metric, name in SHOWN.items():
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
