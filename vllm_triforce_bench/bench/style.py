"""Colours and fonts of the figures: inline SVG that follows the page's light or dark mode."""

import io
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Stand-ins that are replaced by CSS variables of the page once the SVG is written.
INK, FAINT, GRID, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)", PAPER: "var(--paper)"}

# Legible on white and on near black alike; told apart also with a colour-vision deficiency
# (after Okabe and Ito), and by markers.
_BY_METHOD = {
    "stock": "#8a8f98",
    "draft_model": "#e69f00",
    "ngram": "#cc79a7",
    "suffix": "#a58b00",
    "triforce": "#0f8fd6",
    "triforce:all": "#5b6ee1",
    "triforce:level1": "#d55e00",
    "triforce:retrieval": "#009e73",
    "triforce:streaming": "#b0577a",
}
_MARKERS = "osD^vPX*<>"
PARTS = {
    "selection": "#cc79a7",
    "level 1": "#e69f00",
    "level 2": "#0f8fd6",
    "verification": "#009e73",
}
_OTHER_PART, REST_COLOUR = "#b0577a", "#8a8f98"

_SETTINGS = {
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


def colour_of(method: str) -> str:
    return _BY_METHOD[method]


def marker_of(place: int) -> str:
    return _MARKERS[place % len(_MARKERS)]


def colour_of_part(part: str) -> str:
    return PARTS.get(part, _OTHER_PART)


def styled():
    """A context in which figures are drawn."""
    return plt.rc_context(_SETTINGS)


def to_svg(figure, name: str, description: str) -> str:
    """An ``<svg>`` element without anything from outside.

    Args:
        name: another for each figure of a page; ids are made of it.
        description: for those who cannot see it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The size comes from the page; fonts too.
    svg = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', _sized, svg, count=1)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font: (\d+|bold) ([\d.]+px)[^;\"]*", r"font-weight: \1; font-size: \2", svg)
    label = description.replace('"', "'")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _sized(match: re.Match) -> str:
    return f'{match[1]} style="width:{float(match[2]) * 1.25:.0f}px;max-width:100%;height:auto"'
