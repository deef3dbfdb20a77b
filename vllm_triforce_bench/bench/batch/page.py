"""Page and terminal table of fixed batches."""

from collections.abc import Sequence

from rich.table import Table as TerminalTable

from vllm_triforce_bench.bench import figures
from vllm_triforce_bench.bench.batch.summary import REST
from vllm_triforce_bench.bench.report import (
    batch_text,
    facts_of,
    ratio_cards,
    tokens_text,
)
from vllm_triforce_bench.bench.terminal import make_table
from vllm_triforce_bench.colours import shade
from vllm_triforce_bench.page import Article, Cell, Page, Table, grouped, short_name

_SPEED_UP = (
    "Decode tokens per second relative to stock vLLM. Points are medians over repetitions, bars "
    "go from the least to the greatest; both of a ratio's measurements read the same prompts, one "
    "right after the other. Above the dashed line is faster."
)
_STEP = (
    "Milliseconds of one engine step (one full pass, and what goes with it), by part. TriForce "
    "times its own parts; of stock vLLM's methods the whole step is one. At the end of a bar: the "
    "step, and the tokens that it brought to all requests together. A longer step that brings "
    "more tokens can be the faster one."
)
_POSITION = (
    "Of the steps that verified a proposal, the share that accepted its token at each position, "
    "as vLLM counts. A token is only reached where those before it were accepted; a proposal that "
    "is shorter than the longest counts as one that did not reach it."
)
_READING = (
    "Tokens a second: of the whole batch, from the first token to the last, reading the prompt "
    "not counted. Together: the ratio of all repetitions' tokens and times, with its 95 % interval "
    "by bootstrap where there are five repetitions. TTFT: median over requests of the time to the "
    "first token of a prompt that the engine does not know. ITL: time between two outputs of a "
    "request, tokens that come together counting once. Length: mean acceptance length, with the "
    "bonus token. Level 1: share of its tokens that level 2 accepted. Accepted: share of all "
    "proposed tokens that the full pass accepted. Time by part: in the figures' colours; rest the "
    "pointer on it. Memory: {memory}."
)
_CPU_NOTE = (
    "vLLM's CPU build samples wrongly with speculation; that fault is mended in the benchmark's "
    "process, for stock vLLM's own methods too."
)
_NUMBERS = (
    *("tokens/s", "ratio", "spread", "together"),
    *("TTFT ms", "ITL p50 ms", "p99 ms", "length"),
)
_COLOURED = {
    "identical": "[green]identical",
    "tie": "[yellow]tie",
    "different": "[bold red]DIFFERENT",
}


def make_page(results: dict) -> Page:
    """Make the page from the content of results.json."""
    rows, settings = results["rows"], results["settings"]
    sections = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            here = [r for r in rows if (r["dtype"], r["temperature"]) == (dtype, temperature)]
            sampled = f"T={temperature:g}, top-p {settings['top_p']:g}"
            name = f"{dtype}, {'greedy' if not temperature else sampled}"
            if here:
                sections[name] = _articles(here, f"{dtype}-{temperature:g}")
    left_out = results["left_out"].items()
    return Page(
        title=f"Decode speed: {short_name(settings['target'])}",
        heading="Decode speed against stock vLLM",
        cards=_cards(rows),
        alarms=alarms(rows),
        notes=[f"Left out: {name}. {reason}." for name, reason in left_out],
        sections=sections,
        cells=Article(
            "All cells", _READING.format(memory=results["memory"]), table=_cells_table(rows)
        ),
        run_notes=[_CPU_NOTE] if any(settings["temperatures"]) else [],
        **facts_of(
            results,
            {
                "tokens generated": settings["tokens"],
                "repetitions": f"{settings['repetitions']}, each of other prompts",
                "seed": settings["seed"],
                "prompts": settings["prompts"] or f"vLLM's dataset {settings['dataset_name']}",
                "engine arguments": settings["engine_keys"] or "vLLM's defaults",
                "method keys": settings["method_keys"] or "the benchmark's defaults",
            },
        ),
    )


def alarms(rows: Sequence[dict]) -> list[str]:
    """Name the cells whose greedy output differs from stock vLLM's."""
    return [
        f"Greedy output differs from stock vLLM's: {row['label']}, {cell_name(row)}."
        for row in rows
        if row["greedy"] == "different"
    ]


def _cards(rows: Sequence[dict]) -> list[tuple[str, str, str]]:
    others = [row for row in rows if row["method"] != "stock"]
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
        *ratio_cards(ours, "ratio", median_of, cell_name, lambda row: row["ratio"] < 0.97),
        (greedy, note, "bad" if different else "good" if judged else "plain"),
    ]


def _articles(rows: list[dict], salt: str) -> list[Article]:
    articles = [
        Article(
            "Speed-up by context and batch",
            _SPEED_UP,
            figures.speed_up(rows, f"speed-{salt}"),
            _overview_table(rows),
        ),
        Article(
            "Where the time of a step goes", _STEP, figures.step_time(rows, REST, f"step-{salt}")
        ),
    ]
    by_position = figures.acceptance_by_position(rows, f"position-{salt}")
    if by_position is not None:
        articles.append(Article("Acceptance by position", _POSITION, by_position))
    return articles


def _overview_table(rows: Sequence[dict]) -> Table:
    """Ratios, a line for each method and batch, a column for each context."""
    contexts = figures.column_values(rows, "context")
    by_place = {(row["label"], row["batch_size"], row["context"]): row for row in rows}
    lines = []
    for label in figures.labels_of(rows):
        if label == "stock vLLM":
            continue
        for i, batch in enumerate(figures.column_values(rows, "batch_size")):
            ratios = (by_place.get((label, batch, context)) for context in contexts)
            name = Cell(label if not i else "", kind="")
            lines.append([name, Cell(str(batch)), *map(_ratio_cell, ratios)])
    columns = [Cell(kind=""), Cell("batch"), *(Cell(tokens_text(n)) for n in contexts)]
    return Table(columns, lines, kind="heat")


def _ratio_cell(row: dict | None) -> Cell:
    if row is None:
        return Cell()
    low, high = row["ratio_min"], row["ratio_max"]
    return Cell(f"{row['ratio']:.2f}x", f"{low:.2f} to {high:.2f}", colour=shade(row["ratio"]))


def _cells_table(rows: Sequence[dict]) -> Table:
    """Every cell and method."""
    columns = [
        Cell("method", kind=""),
        *(Cell(name) for name in (*_NUMBERS, "level 1", "accepted")),
        Cell("time by part", kind=""),
        Cell("memory"),
        Cell("greedy", kind=""),
    ]
    return Table(columns, grouped(rows, cell_name, _line))


def _line(row: dict) -> list[Cell]:
    level2 = row["level2_acceptance_rate"]
    numbers = [
        *_numbers(row),
        _number(row["level1_acceptance_rate"], ".0%"),
        _number(row["draft_acceptance_rate"] if level2 is None else level2, ".0%"),
    ]
    shares = row["time_shares"]
    title = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    parts = [(share, figures.part_colour(part, REST)) for part, share in shares.items()]
    margin = row["greedy_margin"]
    greedy = row["greedy"] or ""
    return [
        Cell(row["label"], kind=""),
        *map(Cell, numbers),
        Cell(title, kind="", parts=parts),
        Cell(f"{row['memory_mib']:,.0f} MiB"),
        Cell(greedy if margin is None else f"{greedy} (margin {margin:.2g})", kind=greedy),
    ]


def _numbers(row: dict) -> list[str]:
    """Format the figures of ``_NUMBERS``; stock vLLM has no ratios to itself."""
    low, high = row["ratio_low"], row["ratio_high"]
    interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
    ratios = [
        f"{row['ratio']:.2f}x",
        f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
        f"{row['ratio_together']:.2f}x{interval}",
    ]
    return [
        f"{row['decode_tokens_per_second']:.1f}",
        *(["1", "", ""] if row["method"] == "stock" else ratios),
        f"{row['time_to_first_token_ms']:.0f}",
        f"{row['inter_token_latency_p50_ms']:.1f}",
        f"{row['inter_token_latency_p99_ms']:.1f}",
        _number(row["mean_acceptance_length"], ".2f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def cell_name(row: dict) -> str:
    batch = batch_text(row["batch_size"], row["context"])
    return f"{batch}, T={row['temperature']:g}, {row['dtype']}"


def terminal_table(rows: list[dict]) -> TerminalTable:
    columns = ["", *_NUMBERS, "greedy"]
    has_passes = any("outside_passes_share" in row for row in rows)
    if has_passes:
        columns.append("beside passes")
    lines = []
    for row in rows:
        speed, ratio, *others = _numbers(row)
        colour = "green" if row["ratio"] >= 1.03 else "red" if row["ratio"] < 0.97 else "default"
        greedy = _COLOURED.get(row["greedy"], "")
        values = [f"  {row['label']}", speed, f"[{colour}]{ratio}[/]", *others, greedy]
        if "outside_passes_share" in row:
            share, step_ms = row["outside_passes_share"], row["outside_passes_ms_a_step"]
            values.append(f"{share:.0%}, {step_ms:.1f} ms a step")
        elif has_passes:
            values.append("")
        lines.append((cell_name(row), cell_name(row), values))
    return make_table(columns, ("", "greedy"), lines)
