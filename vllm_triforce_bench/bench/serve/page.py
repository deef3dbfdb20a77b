"""Page and terminal table of a serving benchmark."""

from collections.abc import Sequence

from rich.table import Table as TerminalTable

from vllm_triforce_bench.bench import figures
from vllm_triforce_bench.bench.report import facts_of, ratio_cards
from vllm_triforce_bench.bench.serve.settings import CONTROL, TRIFORCE
from vllm_triforce_bench.bench.serve.summary import COUNTS, EVEN, FASTER, SHOWN, SLOWER, cell_of
from vllm_triforce_bench.bench.terminal import make_table
from vllm_triforce_bench.colours import shade
from vllm_triforce_bench.page import Article, Cell, Page, Table, grouped, short_name

_SECTION = ("text", "output_len", "request_rate")
_NOTES = {
    "throughput": "All tokens that were generated, over the time from the first request to the "
    "last answer; reading prompts included. Above the dashed line the challenger is faster.",
    "tpot": "Median over requests of the time between tokens after the first. Below the dashed "
    "line the challenger is faster.",
    "ttft": "Median over requests. Below the dashed line the challenger is faster.",
    "latency": "Median over requests of the time to the last token. Below the dashed line the "
    "challenger is faster. Requests of one length that begin together stay together with stock "
    "vLLM, their prompts read in one step: a late first token, then none that waits for another's "
    "prompt. Where some gain more than others they part. The whole answer tells what it comes to.",
}
_SPREAD = " Points are medians over pairs, bars go from the least to the greatest."
_READING = (
    "Cells in the order in which they ran on the same servers; name: requests under way x "
    "tokens read + generated. Challenger / baseline, medians over pairs, then the median of "
    "the pairs' ratios, the least and the greatest. Length: mean acceptance length. Faster "
    "and slower: the median of tokens/s lies outside all ratios that stock vLLM against "
    "itself had in this cell; without a control, by more than 3 %."
)
_KINDS = {SLOWER: "different", FASTER: "identical"}


def make_page(results: dict) -> Page:
    """Make the page from the content of results.json."""
    rows, settings = results["rows"], results["settings"]
    sections = {}
    for i, section in enumerate(dict.fromkeys(map(_section_of, rows))):
        text, output_len, rate = section
        arrivals = "as soon as there is room" if rate is None else f"{rate:g} a second"
        title = f"{text}, {output_len} tokens generated, requests {arrivals}"
        here = [row for row in rows if _section_of(row) == section]
        sections[title] = [
            Article(
                name[0].upper() + name[1:],
                _NOTES[metric] + _SPREAD,
                figures.serving_ratio(here, metric, f"section-{i}"),
            )
            for metric, name in SHOWN.items()
        ]
    return Page(
        title=f"Serving: {short_name(settings['target'])}",
        heading="Serving against stock vLLM",
        cards=_cards(rows),
        sections=sections,
        cells=Article("All cells", _READING, table=_cells_table(rows)),
        **facts_of(
            results,
            {
                "commits of TriForce": results["checkouts"],
                "pairs": f"{settings['pairs']}, each of other prompts; roles exchanged half-way",
                "CPU that the idle server took": f"{results['idle_share']:.1%} of a core",
                "seed": settings["seed"],
                "text": settings["prompts"] or "none",
                "top-p of sampled requests": settings["top_p"],
                "max_num_seqs": settings["max_num_seqs"],
                "engine arguments": settings["engine_keys"] or "vLLM's defaults",
                "TriForce's keys": settings["triforce_keys"] or "its defaults",
            },
        ),
    )


def _section_of(row: dict) -> tuple:
    return tuple(row[name] for name in _SECTION)


def _cell_name(row: dict) -> str:
    return cell_of(row).describe()


def _is_slower(row: dict) -> bool:
    return row["verdict"] == SLOWER


def _cards(rows: Sequence[dict]) -> list[tuple[str, str, str]]:
    ours = [row for row in rows if row["challenger_name"] == TRIFORCE]
    ours = ours or [row for row in rows if row["challenger_name"] != CONTROL]
    if not ours:
        return []
    num_slower = sum(map(_is_slower, ours))
    controls = [row for row in rows if row["challenger_name"] == CONTROL]
    judged = "slower than all that the control found" if controls else "slower by more than 3 %"
    median_of = f"tokens/s over {len(ours)} cells, {ours[0]['challenger']}"
    cards = [
        *ratio_cards(ours, "throughput_ratio", median_of, _cell_name, _is_slower),
        (f"{num_slower} of {len(ours)}", f"cells {judged}", "bad" if num_slower else "good"),
    ]
    if controls:
        low = min(row["throughput_ratio_min"] for row in controls)
        high = max(row["throughput_ratio_max"] for row in controls)
        text = "stock vLLM against itself, over all its pairs"
        cards.append((f"{low:.2f}-{high:.2f}x", text, "plain"))
    return cards


def _cells_table(rows: Sequence[dict]) -> Table:
    names = [title for name in SHOWN.values() for title in (name, "ratio")]
    names += ["length", *COUNTS, "pairs", ""]
    lines = grouped(rows, lambda row: f"{row['cell_index'] + 1}. {_cell_name(row)}", _line)
    return Table([Cell(kind=""), *map(Cell, names)], lines)


def _line(row: dict) -> list[Cell]:
    cells = [Cell(f"{row['challenger']} / {row['baseline']}", kind="")]
    for metric in SHOWN:
        unit = "" if metric == "throughput" else " ms"
        before, after = row[f"{metric}_baseline"], row[f"{metric}_challenger"]
        ratio, low, high = (row[f"{metric}_ratio{end}"] for end in ("", "_min", "_max"))
        colour = shade(ratio if metric == "throughput" else 1 / ratio)
        cells.append(Cell(f"{after:.1f} / {before:.1f}{unit}"))
        cells.append(Cell(f"{ratio:.2f}x", f"{low:.2f} to {high:.2f}", colour=colour))
    numbers = [_length(row), *(counts(row, name) for name in COUNTS), str(row["pairs"])]
    kind = _KINDS.get(row["verdict"], "")
    return [*cells, *map(Cell, numbers), Cell(row["verdict"], kind=kind)]


def _length(row: dict) -> str:
    length = row["mean_acceptance_length"]
    return "" if length is None else f"{length:.2f}"


def counts(row: dict, name: str) -> str:
    """Medians over pairs, the challenger's first; empty without counts."""
    values = [row[f"{name}_{role}"] for role in ("challenger", "baseline")]
    return "" if None in values else "{:g} / {:g}".format(*values)


def terminal_table(rows: list[dict]) -> TerminalTable:
    """Ratios of each contest, with their minimum and maximum."""
    colours = {EVEN: "default", FASTER: "green", SLOWER: "red"}
    lines = []
    for row in rows:
        ratios = (tuple(row[f"{m}_ratio{end}"] for end in ("", "_min", "_max")) for m in SHOWN)
        values = [
            f"  {row['challenger']} / {row['baseline']}",
            *(f"{ratio:.2f}x ({low:.2f}-{high:.2f})" for ratio, low, high in ratios),
            _length(row),
            *(counts(row, name) for name in COUNTS),
            f"[{colours[row['verdict']]}]{row['verdict']}[/]",
        ]
        # A cell may come again: it is known by its place.
        lines.append((row["cell_index"], _cell_name(row), values))
    columns = ["", *SHOWN.values(), "length", *COUNTS, " "]
    return make_table(columns, ("", " "), lines)
