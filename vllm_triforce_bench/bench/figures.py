"""Figures of the pages: inline SVG that follows the page's light or dark mode."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from vllm_triforce_bench import colours
from vllm_triforce_bench.bench.report import batch_text, tokens_text

# Stand-ins, replaced by CSS variables of the page in the written SVG.
_INK, _FAINT, _GRID = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--ink)", _FAINT: "var(--faint)", _GRID: "var(--grid)"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.titlecolor": _INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "ytick.major.size": 0,
    "xtick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
# Inches of a legend with three columns.
_MIN_WIDTH = 6.6


def column_values(rows: Sequence[dict], name: str) -> list:
    """Distinct values of a column, in order."""
    return sorted({row[name] for row in rows})


def labels_of(rows: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def part_colour(part: str, rest: str) -> str:
    return colours.REST if part == rest else colours.PARTS.get(part, colours.OTHER_PART)


# Ratios to stock vLLM.


def speed_up(rows: Sequence[dict], salt: str) -> str:
    """Draw ratios to stock by context, a panel for each batch size."""
    batches, contexts = column_values(rows, "batch_size"), column_values(rows, "context")
    others = [label for label in labels_of(rows) if label != "stock vLLM"]
    width = max(4.2, min(5.2, 1.1 * len(contexts) + 2.4)) * len(batches)
    with plt.rc_context(_STYLE):
        figure, axes = _panels(1, len(batches), width, 3.6)
        for axis, batch in zip(axes[0], batches):
            _ratio_axis(axis, [tokens_text(context) for context in contexts])
            for i, label in enumerate(others):
                line = [r for r in rows if (r["label"], r["batch_size"]) == (label, batch)]
                line.sort(key=lambda row: row["context"])
                # Side by side, so that bars do not hide each other.
                offset = (i - (len(others) - 1) / 2) * 0.07
                places = [contexts.index(row["context"]) + offset for row in line]
                if line:
                    colour = colours.METHODS[line[0]["method"]]
                    _error_bars(axis, places, line, "ratio", label, colour, i)
            axis.set_title("one request" if batch == 1 else f"{batch} requests together")
            axis.set_xlabel("tokens of context")
        axes[0][0].set_ylim(0, 1.08 * max([row["ratio_max"] for row in rows] + [1.2]))
        axes[0][0].set_ylabel("decode speed, stock vLLM = 1")
        _legend(figure, axes)
        return _to_svg(figure, salt, "Decode speed relative to stock vLLM by context and batch")


def serving_ratio(rows: Sequence[dict], metric: str, salt: str) -> str:
    """Draw a ratio by concurrency, a panel for each temperature and prompt length."""
    inputs, temperatures = column_values(rows, "input_len"), column_values(rows, "temperature")
    concurrencies = column_values(rows, "concurrency")
    contests = list(dict.fromkeys(row["contest"] for row in rows))
    width = (0.8 * len(concurrencies) + 1.6) * len(temperatures)
    with plt.rc_context(_STYLE):
        figure, axes = _panels(
            len(inputs), len(temperatures), width, 2.6 * len(inputs) + 0.4, sharex=True
        )
        for y, input_len in enumerate(inputs):
            for axis, temperature in zip(axes[y], temperatures):
                _ratio_axis(axis, [str(number) for number in concurrencies])
                for i, contest in enumerate(contests):
                    place = (contest, input_len, temperature)
                    names = ("contest", "input_len", "temperature")
                    line = [row for row in rows if tuple(row[name] for name in names) == place]
                    # A cell that came more than once has a point each time.
                    line.sort(key=lambda row: (row["concurrency"], row["cell_index"]))
                    offset = (i - (len(contests) - 1) / 2) * 0.1
                    places = [concurrencies.index(row["concurrency"]) + offset for row in line]
                    if line:
                        label = f"{line[0]['challenger']} / {line[0]['baseline']}"
                        colour = _contest_colour(line[0], i)
                        _error_bars(axis, places, line, f"{metric}_ratio", label, colour, i)
                axis.set_title(f"{tokens_text(input_len)} tokens, T={temperature:g}")
            axes[y][0].set_ylabel("ratio")
        for axis in axes[-1]:
            axis.set_xlabel("requests under way")
        _legend(figure, axes)
        text = "ratio by concurrency, temperature and prompt length"
        return _to_svg(figure, f"{salt}-{metric}", text)


def _contest_colour(row: dict, place: int) -> str:
    if row["challenger_name"] == "control":
        return colours.METHODS["stock"]
    if row["contest"] == "triforce/stock":
        return colours.METHODS["triforce"]
    return colours.CHECKOUTS[place % len(colours.CHECKOUTS)]


def _ratio_axis(axis, ticks: list[str]) -> None:
    axis.axhline(1, color=_FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    axis.xaxis.set_major_locator(FixedLocator(range(len(ticks))))
    axis.set_xticklabels(ticks)
    axis.set_xlim(-0.5, len(ticks) - 0.5)
    axis.grid(axis="x", visible=False)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")


def _error_bars(
    axis, places: list[float], rows: list[dict], name: str, label: str, colour: str, number: int
) -> None:
    """Draw medians, and bars from the minimum to the maximum."""
    axis.errorbar(
        places,
        [row[name] for row in rows],
        yerr=[
            [row[name] - row[f"{name}_min"] for row in rows],
            [row[f"{name}_max"] - row[name] for row in rows],
        ],
        label=label,
        color=colour,
        marker=colours.MARKERS[number % len(colours.MARKERS)],
        markersize=6,
        linewidth=2,
        elinewidth=1.2,
        capsize=2.5,
        alpha=0.95,
    )


# Parts of a step, and acceptance.


def step_time(rows: Sequence[dict], rest: str, salt: str) -> str:
    """Draw the milliseconds of an engine step by part, a panel for each context and batch.

    Args:
        rest: name of the part outside ``propose()``, the last of each bar.
    """
    batches, contexts = column_values(rows, "batch_size"), column_values(rows, "context")
    labels = labels_of(rows)
    names = dict.fromkeys(part for row in rows for part in row["step_parts_ms"])
    parts = [part for part in names if part != rest] + [rest]
    width, height = 3.9 * len(contexts) + 1.2, (0.42 * len(labels) + 1.0) * len(batches)
    with plt.rc_context(_STYLE):
        figure, axes = _panels(len(batches), len(contexts), width, height)
        for y, batch in enumerate(batches):
            for axis, context in zip(axes[y], contexts):
                place = (batch, context)
                here = [row for row in rows if (row["batch_size"], row["context"]) == place]
                _stack(axis, here, labels, parts)
                axis.set_title(batch_text(batch, context))
        for axis in axes[-1]:
            axis.set_xlabel("milliseconds a step")
        axes[0][0].invert_yaxis()
        patches = [plt.Rectangle((0, 0), 1, 1, color=part_colour(part, rest)) for part in parts]
        figure.tight_layout()
        _place_legend(figure, patches, parts, columns=6)
        return _to_svg(figure, salt, "Milliseconds of an engine step by part")


def _stack(axis, rows: list[dict], labels: list[str], parts: list[str]) -> None:
    longest = max((row["step_ms"] for row in rows), default=1.0)
    for row in rows:
        place, end = labels.index(row["label"]), 0.0
        for part in parts:
            width = row["step_parts_ms"].get(part, 0.0)
            colour = part_colour(part, parts[-1])
            axis.barh(place, width, left=end, height=0.62, color=colour)
            end += width
        text = f"{end:.1f} ms, {row['tokens_per_step']:.1f} tok"
        axis.text(end + 0.02 * longest, place, text, va="center", fontsize=9, color=_INK)
    axis.set_xlim(0, 1.42 * longest)
    axis.set_yticks(range(len(labels)), labels)
    axis.tick_params(axis="y", labelcolor=_INK)
    axis.grid(axis="y", visible=False)


def acceptance_by_position(rows: Sequence[dict], salt: str) -> str | None:
    """Draw the share of proposals accepted up to a position; None without proposals."""
    drafted = [row for row in rows if row["acceptance_by_position"]]
    if not drafted:
        return None
    batches, contexts = column_values(drafted, "batch_size"), column_values(drafted, "context")
    labels = labels_of(drafted)
    width = 3.7 * len(contexts) + 0.6
    with plt.rc_context(_STYLE):
        figure, axes = _panels(len(batches), len(contexts), width, 2.7 * len(batches), sharex=True)
        for y, batch in enumerate(batches):
            for axis, context in zip(axes[y], contexts):
                for row in drafted:
                    if (row["batch_size"], row["context"]) == (batch, context):
                        rates, number = row["acceptance_by_position"], labels.index(row["label"])
                        axis.plot(
                            range(1, len(rates) + 1),
                            rates,
                            label=row["label"],
                            color=colours.METHODS[row["method"]],
                            marker=colours.MARKERS[number % len(colours.MARKERS)],
                            markersize=5.5,
                            linewidth=2,
                        )
                axis.set_title(batch_text(batch, context))
                axis.set_ylim(0, 1.05)
                axis.xaxis.set_minor_locator(NullLocator())
                axis.xaxis.get_major_locator().set_params(integer=True)
                axis.yaxis.set_major_formatter(PercentFormatter(1))
                axis.grid(axis="x", visible=False)
            axes[y][0].set_ylabel("accepted")
        for axis in axes[-1]:
            axis.set_xlabel("position in the proposal")
        _legend(figure, axes)
        return _to_svg(figure, salt, "Share of proposals accepted by position")


# Drawing.


def _panels(num_rows: int, num_columns: int, width: float, height: float, sharex: bool = False):
    return plt.subplots(
        num_rows,
        num_columns,
        figsize=(max(_MIN_WIDTH, width), height),
        sharex=sharex,
        sharey=True,
        squeeze=False,
    )


def _legend(figure, axes) -> None:
    """Lay the figure out, with one legend of all panels above it."""
    handles: dict[str, object] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.tight_layout()
    _place_legend(figure, list(handles.values()), list(handles), columns=3)


def _place_legend(figure, handles: list, names: list[str], columns: int) -> None:
    columns = min(columns, max(1, len(names)))
    figure.legend(handles, names, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)


def _to_svg(figure, salt: str, description: str) -> str:
    """Write an ``<svg>`` element without anything from outside.

    Args:
        salt: different for each figure of a page; ids are made of it.
        description: text for screen readers.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Size and font come from the page.
    svg = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', _size, svg, count=1)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font: (\d+|bold) ([\d.]+px)[^;\"]*", r"font-weight: \1; font-size: \2", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def _size(match: re.Match) -> str:
    return f'{match[1]} style="width:{float(match[2]) * 1.25:.0f}px;max-width:100%;height:auto"'
