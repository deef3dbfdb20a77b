"""Colours of figures and tables.

They are legible on white and on near black, and differ for a colour-vision deficiency (after Okabe
and Ito); markers differ, too.
"""

_ORANGE, _PINK, _OLIVE, _BLUE = "#e69f00", "#cc79a7", "#a58b00", "#0f8fd6"
_INDIGO, _VERMILION, _GREEN, _PLUM, _GREY = "#5b6ee1", "#d55e00", "#009e73", "#b0577a", "#8a8f98"
_NAVY, _ROSE, _BROWN = "#3b6fb5", "#d46a9f", "#9a6324"
_MOSS, _VIOLET = "#6a8f3c", "#8e5bb5"

METHODS = {
    "stock": _GREY,
    "draft_model": _ORANGE,
    "eagle3": _BROWN,
    "mtp": _MOSS,
    "ngram": _PINK,
    "suffix": _OLIVE,
    "triforce": _BLUE,
    "triforce:copy": _NAVY,
    "triforce:lookup": _ROSE,
    "triforce:all": _INDIGO,
    "triforce:level1": _VERMILION,
    "triforce:retrieval": _GREEN,
    "triforce:fp8": _VIOLET,
    "triforce:streaming": _PLUM,
}
MARKERS = "osD^vPX*<>"


def shade(ratio: float) -> str:
    """CSS colour of a speed ratio: green if faster, red if slower, translucent for any page."""
    if ratio >= 1:
        return f"rgba(0,158,115,{min(0.55, 0.28 * (ratio - 1)):.2f})"
    return f"rgba(213,50,40,{min(0.6, 1.5 * (1 - ratio)):.2f})"
