"""One HTML page: figures as inline SVG, nothing from outside, light and dark."""

import html
from collections.abc import Sequence

import numpy

from vllm_triforce_bench.bench import figures
from vllm_triforce_bench.bench.page_style import STYLE
from vllm_triforce_bench.bench.page_table import cells_table, overview_table

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


def render(results: dict) -> str:
    """The page.

    Args:
        results: what results.json holds.
    """
    rows = results["rows"]
    parts = [_header(results), _cards(rows), _warnings(results)]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            here = [r for r in rows if (r["dtype"], r["temperature"]) == (dtype, temperature)]
            if here:
                parts.append(_section(results, here, dtype, temperature))
    parts.append(card("All cells", cells_table(rows), _reading(results), wide=True))
    parts.append(card("How it was run", _environment(results), "", wide=True))
    return document(f"Decode speed: {short(results['settings']['target'])}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page of these parts, which are HTML; the title is text."""
    title, body = html.escape(title), "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _header(results: dict) -> str:
    settings, environment = results["settings"], results["environment"]
    draft = settings["draft"]
    facts = [
        f"target <b>{html.escape(short(settings['target']))}</b>",
        f"draft <b>{html.escape(short(draft))}</b>" if draft else "no draft: prompt lookup",
        html.escape(f"{environment['device']}, {environment['cores']} cores"),
        html.escape(f"vLLM {environment['vLLM']}"),
        html.escape(environment["date"]),
    ]
    return (
        "<header><h1>Decode speed against stock vLLM</h1>"
        f"<p>{' <span class=dot>&middot;</span> '.join(facts)}</p></header>"
    )


def _cards(rows: Sequence[dict]) -> str:
    """The figures that are looked for first."""
    others = [row for row in rows if row["method"] != "stock"]
    ours = [row for row in others if row["method"] == "triforce"] or others
    if not ours:
        return ""
    best, worst = (choose(ours, key=lambda row: row["ratio"]) for choose in (max, min))
    judged = [row["greedy"] for row in others if row["greedy"]]
    same, ties = judged.count("identical"), judged.count("tie")
    different = judged.count("different")
    greedy = f"{same} of {len(judged)}" if judged else "not compared"
    note = "cells with greedy output identical to stock's"
    if ties:
        note += f"; {ties} part where stock itself is undecided"
    if different:
        note += f"; {different} DIFFERENT"
    middle = float(numpy.median([row["ratio"] for row in ours]))
    cards = [
        (f"{middle:.2f}x", f"median of {ours[0]['label']} over its {len(ours)} cells", "plain"),
        (f"{best['ratio']:.2f}x", f"fastest: {_cell(best)}", "good"),
        (
            f"{worst['ratio']:.2f}x",
            f"slowest: {_cell(worst)}",
            "bad" if worst["ratio"] < 0.97 else "plain",
        ),
        (greedy, note, "bad" if different else "good" if judged else "plain"),
    ]
    return stat_cards(cards)


def stat_cards(cards: Sequence[tuple[str, str, str]]) -> str:
    """Large figures: value, text, and `plain`, `good` or `bad`."""
    return (
        "<div class=cards>"
        + "".join(
            f"<div class='stat {kind}'><strong>{html.escape(value)}</strong>"
            f"<span>{html.escape(text)}</span></div>"
            for value, text, kind in cards
        )
        + "</div>"
    )


def _cell(row: dict) -> str:
    return (
        f"{row['batch_size']} x {figures.tokens_text(row['context'])} tokens, "
        f"T={row['temperature']:g}, {row['dtype']}"
    )


def _warnings(results: dict) -> str:
    lines = [
        f"Greedy output differs from stock vLLM's: {row['label']}, {_cell(row)}."
        for row in results["rows"]
        if row["greedy"] == "different"
    ]
    text = "".join(f"<p class=alarm>{html.escape(line)}</p>" for line in lines)
    for name, reason in results["left_out"].items():
        text += f"<p class=note>Left out: {html.escape(name)}. {html.escape(reason)}.</p>"
    return text


def _section(results: dict, rows: list[dict], dtype: str, temperature: float) -> str:
    settings = results["settings"]
    sampled = f"T={temperature:g}, top-p {settings['top_p']:g}"
    name = f"{dtype}, {'greedy' if not temperature else sampled}"
    salt = f"{dtype}-{temperature:g}"
    parts = [f"<h2>{html.escape(name)}</h2>"]
    parts.append(
        card(
            "Speed-up by context and batch",
            f"<div class=beside><div class=figure>{figures.speed_up(rows, 'speed-' + salt)}</div>"
            f"{overview_table(rows)}</div>",
            _SPEED_UP,
        )
    )
    step = figures.step_time(rows, "step-" + salt)
    parts.append(card("Where the time of a step goes", f"<div class=figure>{step}</div>", _STEP))
    position = figures.acceptance_by_position(rows, "position-" + salt)
    if position is not None:
        parts.append(
            card("Acceptance by position", f"<div class=figure>{position}</div>", _POSITION)
        )
    return "<section>" + "".join(parts) + "</section>"


def card(title: str, content: str, text: str, wide: bool = False) -> str:
    explained = f"<p class=note>{text}</p>" if text else ""
    kind = "card wide" if wide else "card"
    return f"<article class='{kind}'><h3>{html.escape(title)}</h3>{explained}{content}</article>"


def _reading(results: dict) -> str:
    return html.escape(
        "Tokens a second: of the whole batch, from the first token to the last, reading the prompt "
        "not counted. First token: median over requests of the time to it on a prompt that the "
        "engine does not know. Inter-token: between two outputs of a request, tokens that come "
        "together counting once. Length: mean acceptance length, with the bonus token. Level 1: "
        "share of its tokens that level 2 accepted. Accepted: share of all proposed tokens that "
        "the full pass accepted. Time by part: in the figures' colours; rest the pointer on it. "
        f"Memory: {results['memory']}."
    )


def _environment(results: dict) -> str:
    settings = results["settings"]
    notes = []
    if any(settings["temperatures"]):
        notes.append(
            "vLLM's CPU build samples wrongly with speculation; that fault is mended in the "
            "benchmark's process, for stock vLLM's own methods too"
        )
    facts = dict(results["environment"])
    command = facts.pop("command")
    facts |= {
        "tokens generated": settings["tokens"],
        "repetitions": f"{settings['repetitions']}, each of other prompts",
        "seed": settings["seed"],
        "prompts": settings["prompts"] or f"vLLM's dataset {settings['dataset_name']}",
        "engine arguments": settings["engine_keys"] or "vLLM's defaults",
        "method keys": settings["method_keys"] or "the benchmark's defaults",
    }
    lines = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    notes_text = "".join(f"<p class=note>{html.escape(note)}.</p>" for note in notes)
    return f"<pre>{html.escape(command)}</pre>{notes_text}<table class=facts>{lines}</table>"


def short(model: str) -> str:
    """The last two parts of a path or hub name."""
    return "/".join(model.rstrip("/").split("/")[-2:])
