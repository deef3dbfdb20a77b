"""The tables of the page."""

import html
from collections.abc import Sequence

from vllm_triforce_bench.bench import figures
from vllm_triforce_bench.bench.figures import labels, tokens_text, values


def overview_table(rows: Sequence[dict]) -> str:
    """Ratios, a line for each method and batch, a column for each context, coloured by ratio."""
    contexts, batches = values(rows, "context"), values(rows, "batch_size")
    by_place = {(row["label"], row["batch_size"], row["context"]): row for row in rows}
    head = "".join(f"<th class=n>{tokens_text(context)}</th>" for context in contexts)
    lines = []
    for label in labels(rows):
        if label == "stock vLLM":
            continue
        for i, batch in enumerate(batches):
            cells = "".join(
                _ratio_cell(by_place.get((label, batch, context))) for context in contexts
            )
            name = html.escape(label) if not i else ""
            lines.append(f"<tr><th>{name}</th><td class=n>{batch}</td>{cells}</tr>")
    return (
        "<div class=scroll><table class=heat><thead><tr><th></th><th class=n>batch</th>"
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _ratio_cell(row: dict | None) -> str:
    if row is None:
        return "<td></td>"
    return (
        f"<td class=n style='background:{shade(row['ratio'])}'>{row['ratio']:.2f}x"
        f"<small>{row['ratio_min']:.2f} to {row['ratio_max']:.2f}</small></td>"
    )


def shade(ratio: float) -> str:
    """Green for faster, red for slower, none for equal; translucent, so that it suits any page."""
    if ratio >= 1:
        return f"rgba(0,158,115,{min(0.55, 0.28 * (ratio - 1)):.2f})"
    return f"rgba(213,50,40,{min(0.6, 1.5 * (1 - ratio)):.2f})"


_COLUMNS = (
    "method",
    "tokens/s",
    "ratio",
    "spread",
    "first token",
    "inter-token p50",
    "p99",
    "length",
    "level 1",
    "accepted",
    "time by part",
    "memory",
    "greedy",
)


def cells_table(rows: Sequence[dict]) -> str:
    """Every cell and method."""
    head = "".join(
        f"<th{'' if name in ('method', 'time by part', 'greedy') else ' class=n'}>{name}</th>"
        for name in _COLUMNS
    )
    lines, last = [], None
    for row in rows:
        cell = (row["dtype"], row["context"], row["batch_size"], row["temperature"])
        if cell != last:
            text = f"{cell[2]} x {cell[1]:,} tokens, T={cell[3]:g}, {cell[0]}"
            lines.append(
                f"<tr class=cell><th colspan={len(_COLUMNS)}>{html.escape(text)}</th></tr>"
            )
        last = cell
        lines.append("<tr>" + "".join(_line(row)) + "</tr>")
    return (
        f"<div class=scroll><table class=all><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _line(row: dict) -> list[str]:
    is_stock = row["method"] == "stock"
    level2 = row["level2_acceptance_rate"]
    if level2 is None:
        level2 = row["draft_acceptance_rate"]
    ratio, spread = "1", ""
    if not is_stock:
        ratio = f"{row['ratio']:.2f}x"
        spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
    numbers = [
        f"{row['decode_tokens_per_second']:.1f}",
        ratio,
        spread,
        f"{row['time_to_first_token_ms']:.0f} ms",
        f"{row['inter_token_latency_p50_ms']:.1f} ms",
        f"{row['inter_token_latency_p99_ms']:.1f} ms",
        _number(row["mean_acceptance_length"], ".2f"),
        _number(row["level1_acceptance_rate"], ".0%"),
        _number(level2, ".0%"),
    ]
    return [
        f"<th>{html.escape(row['label'])}</th>",
        *(f"<td class=n>{number}</td>" for number in numbers),
        f"<td>{_shares(row)}</td>",
        f"<td class=n>{row['memory_mib']:,.0f} MiB</td>",
        _greedy(row),
    ]


def _shares(row: dict) -> str:
    """A small bar; the figures are shown where the pointer rests."""
    shares = row["time_shares"]
    text = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    pieces = "".join(
        f"<i style='width:{100 * share:.1f}%;background:{figures.part_colour(part)}'></i>"
        for part, share in shares.items()
    )
    return f"<span class=bar title='{html.escape(text)}'>{pieces}</span>"


def _greedy(row: dict) -> str:
    if row["greedy"] is None:
        return "<td></td>"
    margin = row["greedy_margin"]
    more = "" if margin is None else f" (margin {margin:.2g})"
    return f"<td class={row['greedy']}>{row['greedy']}{more}</td>"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
