"""Draw the pictures, each in a light and a dark version.

Text stays text and layout is reproducible, so the same results give the same file.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.figures import stored
from vllm_triforce_bench import colours
from vllm_triforce_bench.bench.figures import FAINT, GRID, STYLE, to_svg

# Colours of GitHub's text, faint text and lines on its two backgrounds.
PALETTES = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0"},
    "dark": {"ink": "#f0f6fc", "faint": "#9198a1", "grid": "#3d444d"},
}
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_STYLE = STYLE | {"axes.titlesize": 10.5, "font.size": 10, "axes.spines.bottom": False}
_WIDTH = 8.6  # inches
_SCALE = 1.35  # pixels of a page for a point of the drawing
_OURS, _NGRAM, _WINDOWED = colours.METHODS["triforce"], colours.METHODS["ngram"], "#2aa198"
_EAGLE3 = "#d55e00"  # the brown of colours.METHODS is too dark for numbers on a dark page
METHODS = {
    "triforce": ("TriForce", _OURS),
    "eagle3": ("stock vLLM's eagle3", _EAGLE3),
    "ngram": ("stock vLLM's ngram", _NGRAM),
}
_HEADS = {
    ("triforce", 0): ("TriForce, greedy", _OURS, "-"),
    ("windowed", 0): ("stock vLLM, windowed, greedy", _WINDOWED, "--"),
    ("stock", 0): ("stock vLLM, greedy", _EAGLE3, "-"),
    ("triforce", 1): ("TriForce, T=1", _OURS, ":"),
}
_POLICIES = {
    "topk": ("exact top-k", FAINT),
    "retrieval": ("retrieval", _OURS),
    "h2o": ("H2O", _EAGLE3),
    "streaming": ("streaming", _NGRAM),
}
_RATIO_TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 10)


def all_files() -> dict[Path, str]:
    """Draw every picture; return the SVG by file."""
    return {
        stored.FOLDER / f"{name}-{palette}.svg": text
        for name in stored.NAMES
        for palette, text in draw(name).items()
    }


def mark(results: dict) -> str:
    """Return the comment of an SVG that names its results and the drawing library."""
    return f"<!-- results {stored.fingerprint(results)}, matplotlib {matplotlib.__version__} -->"


def draw(name: str) -> dict[str, str]:
    """Draw a picture; return the SVG by palette."""
    results = stored.read(name)
    with plt.rc_context(_STYLE):
        svg = to_svg(_DRAWINGS[name](results["rows"]), name, results["about"])
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    width, height = _SCALE * width, _SCALE * height
    size = f' width="{width:.0f}" height="{height:.0f}" font-family="{_FONTS}"'
    svg = re.sub(r' style="width:[^"]*"', size, svg, count=1)
    svg = svg.replace(">", f">\n{mark(results)}", 1).rstrip() + "\n"
    return {palette: _coloured(svg, values) for palette, values in PALETTES.items()}


def _coloured(svg: str, palette: dict[str, str]) -> str:
    return re.sub(r"var\(--(\w+)\)", lambda variable: palette[variable[1]], svg)


def _front(rows: list[dict]):
    """Answers by context: a column for each temperature, a row for each dtype."""
    contexts = sorted({row["context"] for row in rows})
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    figure, axes = _panels(len(dtypes), 2, 2.6, sharey="col")
    for i, dtype in enumerate(dtypes):
        for axis, temperature in zip(axes[i], (0, 1)):
            shown = [r for row in rows if row["temperature"] == temperature for r in row["ratios"]]
            sampled = "sampled, T=1" if temperature else "greedy"
            _ratios(axis, f"{sampled}, {dtype}", shown)
            _ticks(axis, range(len(contexts)), [f"{context:,}" for context in contexts])
            axis.set_xlim(-0.5, len(contexts) - 0.38)
            for number in range(1, len(contexts)):
                axis.axvline(number - 0.4, color=GRID, linewidth=0.8)
            for row in rows:
                if (row["dtype"], row["temperature"]) == (dtype, temperature):
                    shift = 0.33 * (methods.index(row["method"]) - (len(methods) - 1) / 2)
                    place = contexts.index(row["context"]) + shift
                    _answers(axis, place, row["ratios"], METHODS[row["method"]][1])
    for axis in axes[-1]:
        axis.set_xlabel("tokens of context")
    for axis in axes[:, 0]:
        axis.set_ylabel("speed over stock vLLM")
    lines = [(*METHODS[name], "o", "") for name in methods]
    _legend(figure, [*lines, ("dots: answers, lines: medians", FAINT, "", "")])
    return figure


def _answers(axis, place: float, ratios: Sequence[float], colour: str) -> None:
    """Draw a dot for each answer, and a line with its number for the median."""
    axis.plot([place] * len(ratios), ratios, "o", color=colour, ms=5.5, alpha=0.65, mew=0)
    median = statistics.median(ratios)
    axis.plot([place - 0.05, place + 0.05], [median] * 2, color=colour, linewidth=2)
    # Away from stock vLLM's line.
    side = {"va": "bottom" if median >= 1 else "top", "fontsize": 8, "color": colour}
    text = {"textcoords": "offset points", **side}
    axis.annotate(f"{median:.2f}", (place + 0.05, median), (2, 0), **text)


def _batch(rows: list[dict]):
    """Medians with their range by context: a panel for each batch size."""
    sizes = {
        "1 request": (1,),
        "2 requests": (2,),
        "4 requests": (4,),
        "8 requests (19K: 6)": (6, 8),
    }
    ratios = [row[name] for row in rows for name in ("median", "low", "high") if name in row]
    figure, (axes,) = _panels(1, len(sizes), 3)
    kinds = {
        ("triforce", "float32"): ("TriForce", _OURS, "o", ""),
        ("triforce", "bfloat16"): ("TriForce in bfloat16", _WINDOWED, "s", ""),
        ("ngram", "float32"): (*METHODS["ngram"], "^", ""),
    }
    for axis, (title, batch) in zip(axes, sizes.items()):
        _ratios(axis, title, ratios)
        axis.set_xscale("log")
        _ticks(axis, [256, 1024, 4096, 16384], ["256", "1K", "4K", "16K"])
        axis.set_xlim(180, 48000)
        for place, (key, (_, colour, marker, _)) in enumerate(kinds.items()):
            line = [
                r for r in rows if r["batch_size"] in batch and (r["method"], r["dtype"]) == key
            ]
            for row in line:
                median, context = row["median"], row["context"] * 1.22 ** (place - 1)
                span = [row.get("low", median), row.get("high", median)]
                axis.plot([context] * 2, span, color=colour, linewidth=1.6, alpha=0.6)
                axis.plot(context, median, marker, color=colour, ms=5.5, mew=0)
        axis.set_xlabel("tokens of context")
    axes[0].set_ylabel("speed over stock vLLM")
    _legend(figure, kinds.values())
    return figure


def _head(rows: list[dict]):
    """Acceptance by context: a panel for each of the first three tokens."""
    figure, (axes,) = _panels(1, 3, 2.7)
    contexts = sorted({row["context"] for row in rows})
    for position, (axis, name) in enumerate(zip(axes, ("first", "second", "third"))):
        axis.set_title(f"{name} token")
        for key, (_, colour, style) in _HEADS.items():
            line = [
                r["acceptance"][position] for r in rows if (r["engine"], r["temperature"]) == key
            ]
            axis.plot(range(len(line)), line, style, marker="o", color=colour, ms=5, linewidth=2)
        _ticks(axis, range(len(contexts)), [f"{context:,}" for context in contexts])
        axis.set_ylim(0.2, 0.85)
        axis.grid(axis="x", visible=False)
        axis.set_xlabel("tokens of context")
    axes[0].set_ylabel("acceptance")
    _legend(figure, [(label, colour, "o", style) for label, colour, style in _HEADS.values()])
    return figure


def _acceptance(rows: list[dict]):
    """Acceptance of level 2's tokens by budget, context and tokens of a selection."""
    figure, axes = _panels(2, 2, 2.5)
    varied = ("chunk", "recent", "tokens_per_selection")
    plain = [row for row in rows if not any(name in row for name in varied)]
    for axis, model, context, title in (
        (axes[0, 0], "pair", 16384, "embedded target, 16,384 tokens"),
        (axes[0, 1], "smollm2", 7168, "SmolLM2, 7,168 tokens"),
    ):
        here = [row for row in plain if (row["model"], row["context"]) == (model, context)]
        budgets = sorted({row["budget"] for row in here})
        _ticks(axis, range(len(budgets)), [f"{budget:,}" for budget in budgets])
        axis.set_title(title)
        axis.set_xlabel("budget in tokens")
        for policy, (label, colour) in _POLICIES.items():
            line = [row for row in here if row["policy"] == policy]
            if line:
                _band(axis, label, colour, line)
    lines = [r for r in plain if (r["model"], r["policy"]) == ("pair", "retrieval")]
    _by(axes[1, 0], [r for r in lines if r["budget"] in (1024, 4096)], "context", "{:,}")
    axes[1, 0].set_title("embedded target, retrieval")
    axes[1, 0].set_xlabel("tokens of context")
    by_tokens = [row for row in rows if "tokens_per_selection" in row]
    _by(axes[1, 1], by_tokens, "tokens_per_selection", "{}")
    axes[1, 1].set_title("SmolLM2, retrieval, 7,168 tokens")
    axes[1, 1].set_xlabel("tokens of a selection")
    for axis in axes.flat:
        axis.set_ylim(0.83, 1.005)
        axis.grid(axis="x", visible=False)
        places = axis.get_xticks()
        axis.set_xlim(-0.3, places[-1] * 1.32)  # room for names
    for axis in axes[:, 0]:
        axis.set_ylabel("acceptance")
    figure.tight_layout()
    return figure


def _band(axis, label: str, colour: str, rows: Sequence[dict]) -> None:
    """Draw a policy by budget, with the deviation as a band and the name at its end."""
    places, values = range(len(rows)), [row["acceptance"] for row in rows]
    lows, highs = (
        [row["acceptance"] + sign * row["deviation"] for row in rows] for sign in (-1, 1)
    )
    axis.fill_between(places, lows, highs, color=colour, alpha=0.18, linewidth=0)
    axis.plot(places, values, "o-", color=colour, ms=5, linewidth=2)
    _label(axis, label, colour, places[-1], values[-1])


def _by(axis, rows: Sequence[dict], name: str, form: str) -> None:
    """Draw a line for each budget."""
    budgets, values = (sorted({row[key] for row in rows}) for key in ("budget", name))
    for budget, style in zip(budgets, ("o--", "o-")):
        line = {row[name]: row["acceptance"] for row in rows if row["budget"] == budget}
        axis.plot([values.index(value) for value in sorted(line)], [line[v] for v in sorted(line)],
                  style, color=_OURS, ms=5, linewidth=2)  # fmt: skip
        _label(axis, f"budget {budget:,}", _OURS, len(values) - 1, line[values[-1]])
    _ticks(axis, range(len(values)), [form.format(value) for value in values])


def _label(axis, text: str, colour: str, place: float, value: float) -> None:
    style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": colour}
    axis.annotate(text, (place, value), (7, 0), **style)


def _panels(num_rows: int, num_columns: int, height: float, sharey: Any = True) -> tuple[Any, Any]:
    size = (_WIDTH, height * num_rows)
    return plt.subplots(num_rows, num_columns, figsize=size, sharey=sharey, squeeze=False)


def _ratios(axis, title: str, ratios: Iterable[float]) -> None:
    """Lay an axis of speeds out: logarithmic, with stock vLLM's at 1."""
    axis.set_title(title)
    axis.set_yscale("log")
    low, high = 0.93 * min(*ratios, 0.8), 1.08 * max(*ratios, 2)
    axis.set_ylim(low, high)
    axis.yaxis.set_major_locator(FixedLocator([t for t in _RATIO_TICKS if low <= t <= high]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.axhline(1, color=FAINT, linewidth=1.4)
    axis.grid(axis="x", visible=False)


def _ticks(axis, places: Sequence[float], labels: Sequence[str]) -> None:
    axis.xaxis.set_major_locator(FixedLocator(places))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticklabels(labels)


def _legend(figure, lines: Iterable[tuple[str, str, str, str]]) -> None:
    """Write label, colour, marker and line style of each series above the panels."""
    handles = [
        Line2D([], [], label=label, color=colour, marker=marker, ls=style, linewidth=2, mew=0)
        for label, colour, marker, style in lines
    ]
    figure.tight_layout()
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.02, 1),
        borderaxespad=0,
        ncols=len(handles),
        labelcolor="linecolor",
        handletextpad=0.4,
        columnspacing=1.6,
    )


_DRAWINGS: dict[str, Callable[[list[dict]], Any]] = {
    "front": _front,
    "head": _head,
    "batch": _batch,
    "acceptance": _acceptance,
}
