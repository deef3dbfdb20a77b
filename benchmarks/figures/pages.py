"""Write the front page's picture, with its figures in text, into the pages that show it."""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from benchmarks.figures import stored
from benchmarks.figures.draw import METHODS

README, HOME = stored.ROOT / "README.md", stored.ROOT / "docs" / "index.md"
_BEGIN = "<!-- figures: made by python -m benchmarks.figures draw -->\n"
_END = "<!-- end of figures -->"


def all_pages() -> dict[Path, str]:
    """Return the text of each page with its figures made anew; the front page has a table, too."""
    results = stored.read("front")
    return {
        README: _written(README, [*_picture(results, README), *_table(results["rows"])], results),
        HOME: _written(HOME, _picture(results, HOME), results),
    }


def _written(page: Path, lines: Iterable[str], results: dict) -> str:
    text = page.read_text()
    pattern = re.escape(_BEGIN) + ".*?" + re.escape(_END)
    if not re.search(pattern, text, re.S):
        raise ValueError(f"{page.name} has no place for figures: {_BEGIN!r} to {_END!r}")
    block = "\n".join([*lines, *_origin(results, _folder(page)), _END])
    return re.sub(pattern, lambda _: _BEGIN + block, text, flags=re.S)


def _folder(page: Path) -> str:
    """Return the folder of the pictures, as the page names it."""
    return stored.FOLDER.relative_to(page.parent).as_posix()


def _picture(results: dict, page: Path) -> list[str]:
    folder = _folder(page)
    return [
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{folder}/front-dark.svg">',
        f'  <img alt="{results["about"]}" src="{folder}/front-light.svg">',
        "</picture>",
        "",
    ]


def _table(rows: list[dict]) -> list[str]:
    columns = list(dict.fromkeys((row["dtype"], row["temperature"]) for row in rows))
    names = [f"{dtype}, {f'T={t:g}' if t else 'greedy'}" for dtype, t in columns]
    lines = [
        f"| slowest to fastest answer | {' | '.join(names)} |",
        f"|{'---|' * (1 + len(names))}",
    ]
    for method, (label, _) in METHODS.items():
        cells = [_span(rows, method, *column) for column in columns]
        if any(cells):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, ""]


def _span(rows: list[dict], method: str, dtype: str, temperature: float) -> str:
    ratios = [
        ratio
        for row in rows
        if (row["method"], row["dtype"], row["temperature"]) == (method, dtype, temperature)
        for ratio in row["ratios"]
    ]
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x" if ratios else ""


def _origin(results: dict, folder: str) -> list[str]:
    """Say what was measured, where and when, with a link to the raw answers."""
    runs = results["runs"].values()
    processors, dates, commits = (
        ", ".join(dict.fromkeys(run[name] for run in runs))
        for name in ("processor", "date", "commit")
    )
    counts = sorted({len(row["ratios"]) for row in results["rows"]})
    text = (
        f"{results['about']}. {' or '.join(map(str, counts))} answers at each context, "
        f"{processors}, {dates}, commit {commits}: [raw answers and command]({folder}/front.json). "
        f"{results.get('note', '')}"
    )
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
