"""Colours of figures and tables.

They are legible on white and on near black, and differ for a colour-vision deficiency (after Okabe
and Ito); markers differ, too.
"""

METHODS = {
    "stock": "#8a8f98",
    "draft_model": "#e69f00",
    "eagle3": "#9a6324",
    "mtp": "#6a8f3c",
    "ngram": "#cc79a7",
    "suffix": "#a58b00",
    "triforce": "#0f8fd6",
    "triforce:copy": "#3b6fb5",
    "triforce:lookup": "#d46a9f",
    "triforce:all": "#5b6ee1",
    "triforce:level1": "#d55e00",
    "triforce:retrieval": "#009e73",
    "triforce:fp8": "#8e5bb5",
    "triforce:streaming": "#b0577a",
}
MARKERS = "osD^vPX*<>"


def shade(ratio: float) -> str:
    """CSS colour of a speed ratio: green if faster, red if slower, translucent for any page."""
    if ratio >= 1:
        return f"rgba(0,158,115,{min(0.55, 0.28 * (ratio - 1)):.2f})"
    return f"rgba(213,50,40,{min(0.6, 1.5 * (1 - ratio)):.2f})"
