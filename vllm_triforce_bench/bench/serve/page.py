"""The page of a serving benchmark."""

import html
from collections.abc import Sequence

import numpy

from vllm_triforce_bench.bench.page import card, document, short, stat_cards
from vllm_triforce_bench.bench.page_table import shade
from vllm_triforce_bench.bench.serve import figures
from vllm_triforce_bench.bench.serve.settings import CONTROL, TRIFORCE
from vllm_triforce_bench.bench.serve.summary import COUNTS, SHOWN, SLOWER, cell_of
from vllm_triforce_bench.bench.serve.terminal import counts

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


def render(results: dict) -> str:
    """The page.

    Args:
        results: what results.json holds.
    """
    rows = results["rows"]
    parts = [_header(results), _cards(rows)]
    sections = dict.fromkeys(tuple(row[name] for name in _SECTION) for row in rows)
    for i, section in enumerate(sections):
        here = [row for row in rows if tuple(row[name] for name in _SECTION) == section]
        parts.append(_section(here, f"section-{i}"))
    parts.append(card("All cells", _table(rows), _reading(), wide=True))
    parts.append(card("How it was run", _environment(results), "", wide=True))
    return document(f"Serving: {short(results['settings']['target'])}", parts)


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
        "<header><h1>Serving against stock vLLM</h1>"
        f"<p>{' <span class=dot>&middot;</span> '.join(facts)}</p></header>"
    )


def _cards(rows: Sequence[dict]) -> str:
    ours = [row for row in rows if row["challenger_name"] == TRIFORCE]
    ours = ours or [row for row in rows if row["challenger_name"] != CONTROL]
    if not ours:
        return ""
    ratios = [row["throughput_ratio"] for row in ours]
    best, worst = (choose(ours, key=lambda row: row["throughput_ratio"]) for choose in (max, min))
    slower = [row for row in ours if row["verdict"] == SLOWER]
    controls = [row for row in rows if row["challenger_name"] == CONTROL]
    judged = "slower than all that the control found" if controls else "slower by more than 3 %"
    cards = [
        (
            f"{numpy.median(ratios):.2f}x",
            f"median of tokens/s over {len(ours)} cells, {ours[0]['challenger']}",
            "plain",
        ),
        (f"{best['throughput_ratio']:.2f}x", f"fastest: {cell_of(best).describe()}", "good"),
        (
            f"{worst['throughput_ratio']:.2f}x",
            f"slowest: {cell_of(worst).describe()}",
            "bad" if worst["verdict"] == SLOWER else "plain",
        ),
        (f"{len(slower)} of {len(ours)}", f"cells {judged}", "bad" if slower else "good"),
    ]
    if controls:
        low = min(row["throughput_ratio_min"] for row in controls)
        high = max(row["throughput_ratio_max"] for row in controls)
        text = "stock vLLM against itself, over all its pairs"
        cards.append((f"{low:.2f}-{high:.2f}x", text, "plain"))
    return stat_cards(cards)


def _section(rows: list[dict], salt: str) -> str:
    text, output_len, rate = (rows[0][name] for name in _SECTION)
    came = "as soon as there is room" if rate is None else f"{rate:g} a second"
    title = f"{text}, {output_len} tokens generated, requests {came}"
    parts = [f"<h2>{html.escape(title)}</h2>"]
    for metric, name in SHOWN.items():
        svg = figures.ratio(rows, metric, "ratio", f"{salt}-{metric}")
        parts.append(
            card(
                name[0].upper() + name[1:],
                f"<div class=figure>{svg}</div>",
                _NOTES[metric] + _SPREAD,
            )
        )
    return "<section>" + "".join(parts) + "</section>"


def _table(rows: Sequence[dict]) -> str:
    numbers = [
        *(f"<th class=n>{name}</th><th class=n>ratio</th>" for name in SHOWN.values()),
        "<th class=n>length</th>",
        *(f"<th class=n>{name}</th>" for name in COUNTS),
        "<th class=n>pairs</th><th></th>",
    ]
    lines, last = [], None
    for row in rows:
        if row["cell_index"] != last:
            name = html.escape(f"{row['cell_index'] + 1}. {cell_of(row).describe()}")
            lines.append(f"<tr class=cell><th colspan=12>{name}</th></tr>")
        last = row["cell_index"]
        lines.append("<tr>" + _line(row) + "</tr>")
    return (
        "<div class=scroll><table class=all><thead><tr><th></th>"
        f"{''.join(numbers)}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _line(row: dict) -> str:
    cells = [f"<th>{html.escape(row['challenger'])} / {html.escape(row['baseline'])}</th>"]
    for metric in SHOWN:
        unit = "" if metric == "throughput" else " ms"
        before, after = row[f"{metric}_baseline"], row[f"{metric}_challenger"]
        ratio, low, high = (row[f"{metric}_ratio{end}"] for end in ("", "_min", "_max"))
        speed_up = ratio if metric == "throughput" else 1 / ratio
        cells.append(f"<td class=n>{after:.1f} / {before:.1f}{unit}</td>")
        cells.append(
            f"<td class=n style='background:{shade(speed_up)}'>{ratio:.2f}x "
            f"<small>{low:.2f} to {high:.2f}</small></td>"
        )
    length = row["mean_acceptance_length"]
    cells.append(f"<td class=n>{'' if length is None else f'{length:.2f}'}</td>")
    cells += [f"<td class=n>{counts(row, name)}</td>" for name in COUNTS]
    cells.append(f"<td class=n>{row['pairs']}</td>")
    kind = {"slower": "different", "faster": "identical"}.get(row["verdict"], "")
    cells.append(f"<td class='{kind}'>{row['verdict']}</td>")
    return "".join(cells)


def _reading() -> str:
    return html.escape(
        "Cells in the order in which they ran on the same servers; name: requests under way x "
        "tokens read + generated. Challenger / baseline, medians over pairs, then the median of "
        "the pairs' ratios, the least and the greatest. Length: mean acceptance length. Faster "
        "and slower: the median of tokens/s lies outside all ratios that stock vLLM against "
        "itself had in this cell; without a control, by more than 3 %."
    )


def _environment(results: dict) -> str:
    settings = results["settings"]
    facts = dict(results["environment"])
    command = facts.pop("command")
    facts |= {
        "commits of TriForce": results["checkouts"],
        "pairs": f"{settings['pairs']}, each of other prompts; roles exchanged half-way",
        "CPU that the idle server took": f"{results['idle_share']:.1%} of a core",
        "seed": settings["seed"],
        "text": settings["prompts"] or "none",
        "top-p of sampled requests": settings["top_p"],
        "max_num_seqs": settings["max_num_seqs"],
        "engine arguments": settings["engine_keys"] or "vLLM's defaults",
        "TriForce's keys": settings["triforce_keys"] or "its defaults",
    }
    lines = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<pre>{html.escape(command)}</pre><table class=facts>{lines}</table>"
