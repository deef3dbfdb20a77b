"""One HTML page for every tool: figures and tables inline, nothing from outside, light and dark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        small: second line.
        kind: CSS classes; ``n`` for a number.
    """

    text: str = ""
    small: str = ""
    kind: str = "n"
    colour: str = ""


@dataclass(frozen=True)
class Table:
    """A table; a row that is one text is the heading of the rows below it."""

    columns: Sequence[Cell]
    rows: Sequence[str | Sequence[Cell]]
    kind: str = "all"


@dataclass(frozen=True)
class Article:
    """A card of the page: a figure (SVG or an ``img`` element), a table, or both side by side."""

    title: str
    note: str = ""
    figure: str | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """Content of a page: facts stand below the heading, those of the run in a table at its end."""

    title: str
    heading: str
    facts: Sequence[str]
    sections: Mapping[str, Sequence[Article]]
    run: Mapping[str, Any]
    command: str = ""
    alarms: Sequence[str] = ()
    notes: Sequence[str] = ()

    def render(self) -> str:
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
        return environment.get_template("page.html").render(page=self)


def short_name(model: str) -> str:
    """Last two parts of a path or hub name."""
    return "/".join(model.rstrip("/").split("/")[-2:])
