"""Figures of the pages: inline SVG that follows the page's light or dark mode."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy

matplotlib.use("svg")
import matplotlib.pyplot as plt

from vllm_triforce_bench import colours
from vllm_triforce_bench.bench.grid import tokens_text
from vllm_triforce_bench.bench.methods import STOCK

# Stand-ins, replaced by CSS variables of the page in the written SVG.
INK, FAINT, GRID = "#010203", "#040506", "#070809"
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)"}
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
    "xtick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
# Inches of a legend with three columns.
_MIN_WIDTH = 6.6


def ratios(rows: Sequence[dict], column: str, salt: str) -> str:
    """Draw ratios to stock by context: medians and their range, a panel for each batch size."""
    batches, contexts = (sorted({row[name] for row in rows}) for name in ("batch_size", "context"))
    others = list(dict.fromkeys(row["label"] for row in rows if row["method"] != STOCK))
    width = max(4.2, min(5.2, 1.1 * len(contexts) + 2.4)) * len(batches)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, len(batches), figsize=(max(_MIN_WIDTH, width), 3.6), sharey=True, squeeze=False
        )
        axes = grid[0]
        for axis, batch in zip(axes, batches):
            axis.axhline(1, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
            axis.set_xticks(range(len(contexts)), map(tokens_text, contexts))
            axis.set_xlim(-0.5, len(contexts) - 0.5)
            axis.grid(axis="x", visible=False)
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
            for i, label in enumerate(others):
                line = [r for r in rows if (r["label"], r["batch_size"]) == (label, batch)]
                line.sort(key=lambda row: row["context"])
                # Side by side, so that bars do not hide each other.
                offset = (i - (len(others) - 1) / 2) * 0.07
                places = [contexts.index(row["context"]) + offset for row in line]
                low, middle, high = ([r[column + e] for r in line] for e in ("_min", "", "_max"))
                if line:
                    axis.errorbar(
                        places,
                        middle,
                        yerr=abs(numpy.array([low, high]) - middle),
                        label=label,
                        color=colours.METHODS.get(line[0]["method"], colours.METHODS[STOCK]),
                        marker=colours.MARKERS[i % len(colours.MARKERS)],
                        markersize=6,
                        linewidth=2,
                        elinewidth=1.2,
                        capsize=2.5,
                        alpha=0.95,
                    )
            axis.set_title("one request" if batch == 1 else f"{batch} requests together")
            axis.set_xlabel("tokens of context")
        axes[0].set_ylim(0, 1.08 * max([row[f"{column}_max"] for row in rows] + [1.2]))
        axes[0].set_ylabel("stock vLLM = 1")
        figure.tight_layout()
        # One legend of all panels, above them; a panel may lack some lines.
        handles: dict[str, Any] = {}
        for axis in axes:
            handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
        figure.legend(
            handles.values(),
            handles,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=min(3, max(1, len(handles))),
        )
        return to_svg(figure, salt, "Ratio to stock vLLM by context and batch")


def to_svg(figure, salt: str, description: str) -> str:
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
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # of matplotlib 3.11 on
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def _size(match: re.Match) -> str:
    return f'{match[1]} style="width:{float(match[2]) * 1.25:.0f}px;max-width:100%;height:auto"'
