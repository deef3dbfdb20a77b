"""Writes the tables of docs/keys.md and docs/metrics.md from the package's keys and counters.

python tools/docs_tables.py            # writes them
python tools/docs_tables.py --check    # ends with 1 where they are not as written
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEYS_PAGE, METRICS_PAGE = ROOT / "docs" / "keys.md", ROOT / "docs" / "metrics.md"


def key_tables() -> dict[str, str]:
    """Tables of docs/keys.md, by section."""
    from vllm_triforce.config.keys import KEYS

    head = ("key", "default", "unit", "meaning", "when to change it")
    return _tables(
        head,
        [
            (
                key.section,
                (f"`{name}`", _default(field, key), _unit(key), key.help, key.change),
            )
            for name, (field, key) in KEYS.items()
        ],
    )


def metric_tables() -> dict[str, str]:
    """Tables of docs/metrics.md, by section."""
    from vllm_triforce.metrics.counters import COUNTERS, PROPOSE_SECONDS

    counters = [*COUNTERS.values(), PROPOSE_SECONDS]
    rows = [(c.section, (f"`vllm:triforce_{c.metric}_total`", c.unit, c.help)) for c in counters]
    return _tables(("metric", "unit", "counts"), rows)


def _default(field: Any, key: Any) -> str:
    if key.default_text:
        return key.default_text
    if isinstance(field.default, (bool, str)):
        return f"`{str(field.default).lower()}`"
    return str(field.default)


def _unit(key: Any) -> str:
    if key.high is not None:
        return f"{key.unit}, {key.low} to {key.high}"
    if key.low is not None and key.low >= 1:  # that a number is not negative goes without saying
        return f"{key.unit}, at least {key.low}"
    return key.unit


def _tables(head: tuple[str, ...], rows: list[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Markdown tables of (section, cells)."""
    tables: dict[str, str] = {}
    for section, cells in rows:
        start = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
        tables[section] = tables.get(section, start) + f"| {' | '.join(cells)} |\n"
    return tables


def written(page: Path, tables: dict[str, str]) -> str:
    """The page with its tables made anew."""
    text = page.read_text()
    for name, table in tables.items():
        begin = f"<!-- {name}: made by tools/docs_tables.py -->\n"
        end = f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if not re.search(pattern, text, re.S):
            raise ValueError(f"{page.name} has no place for {name!r}: {begin!r} to {end!r}")
        text = re.sub(pattern, lambda _, new=begin + table + end: new, text, flags=re.S)
    return text


PAGES: dict[Path, Callable[[], dict[str, str]]] = {
    KEYS_PAGE: key_tables,
    METRICS_PAGE: metric_tables,
}


def stale() -> dict[Path, str]:
    """Pages that are not as written, and what they should be."""
    pages = {page: written(page, tables()) for page, tables in PAGES.items()}
    return {page: text for page, text in pages.items() if text != page.read_text()}


def main() -> int:
    pages = stale()
    if "--check" in sys.argv[1:]:
        for page in pages:
            print(f"docs/{page.name} is out of date: run python tools/docs_tables.py")
        return int(bool(pages))
    for page, text in pages.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
