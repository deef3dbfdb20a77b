"""The pictures: speed-up by context and batch, where a step's time goes, acceptance by position."""

from collections.abc import Sequence

from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from vllm_triforce_bench.bench.style import (
    FAINT,
    INK,
    REST_COLOUR,
    colour_of,
    colour_of_part,
    marker_of,
    plt,
    styled,
    to_svg,
)
from vllm_triforce_bench.bench.summary import REST

_LEAST_WIDTH = 6.6
"""Of a figure, in inches: a legend of three columns."""


def values(rows: Sequence[dict], name: str) -> list:
    """What a column holds, each once, in order."""
    return sorted({row[name] for row in rows})


def labels(rows: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def tokens_text(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def speed_up(rows: Sequence[dict], name: str) -> str:
    """Ratio to stock by context, a panel for each batch size; bars from least to greatest."""
    batches, contexts = values(rows, "batch_size"), values(rows, "context")
    others = [label for label in labels(rows) if label != "stock vLLM"]
    with styled():
        width = max(4.2, min(5.2, 1.1 * len(contexts) + 2.4))
        figure, axes = plt.subplots(
            1,
            len(batches),
            figsize=(max(_LEAST_WIDTH, width * len(batches)), 3.6),
            sharey=True,
            squeeze=False,
        )
        for axis, batch in zip(axes[0], batches):
            axis.axhline(1, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
            for i, label in enumerate(others):
                found = [r for r in rows if r["label"] == label and r["batch_size"] == batch]
                found.sort(key=lambda row: row["context"])
                if not found:
                    continue
                # Side by side, so that bars do not hide each other.
                offset = (i - (len(others) - 1) / 2) * 0.07
                places = [contexts.index(row["context"]) + offset for row in found]
                ratios = [row["ratio"] for row in found]
                spread = [
                    [row["ratio"] - row["ratio_min"] for row in found],
                    [row["ratio_max"] - row["ratio"] for row in found],
                ]
                axis.errorbar(
                    places,
                    ratios,
                    yerr=spread,
                    label=label,
                    color=_colour(found),
                    marker=marker_of(i),
                    markersize=6,
                    linewidth=2,
                    elinewidth=1.2,
                    capsize=2.5,
                    alpha=0.95,
                )
            axis.set_title("one request" if batch == 1 else f"{batch} requests together")
            axis.set_xlabel("tokens of context")
            axis.xaxis.set_major_locator(FixedLocator(range(len(contexts))))
            axis.set_xticklabels([tokens_text(context) for context in contexts])
            axis.set_xlim(-0.5, len(contexts) - 0.5)
            axis.grid(axis="x", visible=False)
        top = max([row["ratio_max"] for row in rows] + [1.2])
        axes[0][0].set_ylim(0, top * 1.08)
        axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes[0][0].set_ylabel("decode speed, stock vLLM = 1")
        _legend(figure, axes[0][0])
        return to_svg(figure, name, "Decode speed relative to stock vLLM by context and batch")


def step_time(rows: Sequence[dict], name: str) -> str:
    """Milliseconds of an engine step by part, a panel for each context and batch."""
    batches, contexts = values(rows, "batch_size"), values(rows, "context")
    shown = labels(rows)
    parts = [part for part in _parts(rows) if part != REST] + [REST]
    with styled():
        figure, axes = plt.subplots(
            len(batches),
            len(contexts),
            figsize=(
                max(_LEAST_WIDTH, 3.9 * len(contexts) + 1.2),
                (0.42 * len(shown) + 1.0) * len(batches),
            ),
            sharey=True,
            squeeze=False,
        )
        for y, batch in enumerate(batches):
            for x, context in enumerate(contexts):
                axis = axes[y][x]
                here = {
                    row["label"]: row
                    for row in rows
                    if (row["batch_size"], row["context"]) == (batch, context)
                }
                _stack(axis, here, shown, parts)
                axis.set_title(f"{batch} x {tokens_text(context)} tokens")
        for axis in axes[-1]:
            axis.set_xlabel("milliseconds a step")
        axes[0][0].invert_yaxis()
        handles = [plt.Rectangle((0, 0), 1, 1, color=part_colour(part)) for part in parts]
        figure.tight_layout()
        figure.legend(
            handles, parts, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(6, len(parts))
        )
        return to_svg(figure, name, "Milliseconds of an engine step by part")


def _stack(axis, here: dict[str, dict], shown: list[str], parts: list[str]) -> None:
    longest = max((row["step_ms"] for row in here.values()), default=1.0)
    for place, label in enumerate(shown):
        if label not in here:
            continue
        row, left = here[label], 0.0
        for part in parts:
            width = row["step_parts_ms"].get(part, 0.0)
            axis.barh(place, width, left=left, height=0.62, color=part_colour(part))
            left += width
        axis.text(
            left + 0.02 * longest,
            place,
            f"{left:.1f} ms, {row['tokens_per_step']:.1f} tok",
            va="center",
            fontsize=9,
            color=INK,
        )
    axis.set_xlim(0, 1.42 * longest)
    axis.set_yticks(range(len(shown)), shown)
    axis.tick_params(axis="y", labelcolor=INK)
    axis.grid(axis="y", visible=False)


def acceptance_by_position(rows: Sequence[dict], name: str) -> str | None:
    """Share of proposals whose token at a position was accepted, a panel for each context."""
    found = [row for row in rows if row["acceptance_by_position"]]
    if not found:
        return None
    contexts = values(found, "context")
    batches = values(found, "batch_size")
    shown = labels(found)
    with styled():
        figure, axes = plt.subplots(
            len(batches),
            len(contexts),
            figsize=(max(_LEAST_WIDTH, 3.7 * len(contexts) + 0.6), 2.7 * len(batches)),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for y, batch in enumerate(batches):
            for x, context in enumerate(contexts):
                axis = axes[y][x]
                for row in found:
                    if (row["batch_size"], row["context"]) != (batch, context):
                        continue
                    rates = row["acceptance_by_position"]
                    axis.plot(
                        range(1, len(rates) + 1),
                        rates,
                        label=row["label"],
                        color=colour_of(row["method"]),
                        marker=marker_of(shown.index(row["label"])),
                        markersize=5.5,
                        linewidth=2,
                    )
                axis.set_title(f"{batch} x {tokens_text(context)} tokens")
                axis.set_ylim(0, 1.05)
                axis.xaxis.set_minor_locator(NullLocator())
                axis.xaxis.get_major_locator().set_params(integer=True)
                axis.yaxis.set_major_formatter(PercentFormatter(1))
                axis.grid(axis="x", visible=False)
            axes[y][0].set_ylabel("accepted")
        for axis in axes[-1]:
            axis.set_xlabel("position in the proposal")
        _legend(figure, *axes.flat)
        return to_svg(figure, name, "Share of proposals accepted by position")


def _parts(rows: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(part for row in rows for part in row["step_parts_ms"]))


def part_colour(part: str) -> str:
    return REST_COLOUR if part == REST else colour_of_part(part)


def _colour(found: Sequence[dict]) -> str:
    return colour_of(found[0]["method"])


def _legend(figure, *axes) -> None:
    named: dict[str, object] = {}
    for axis in axes:
        handles, names = axis.get_legend_handles_labels()
        named |= dict(zip(names, handles))
    figure.tight_layout()
    figure.legend(
        list(named.values()),
        list(named),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(3, max(1, len(named))),
    )
