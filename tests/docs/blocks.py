"""Fenced code blocks of the pages that people read, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.models import PAIR, PROMPTS, ROOT

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
# What a reader fills in, and what a test does.
PLACES = {
    "TARGET": str(PAIR / "target"),
    "DRAFT": str(PAIR / "draft"),
    "FILE": str(PROMPTS / "held_out.txt"),
    "FOLDER": "results",
}


@dataclass(frozen=True)
class Block:
    """
    Args:
        page: below the project's root.
        line: of its first line of code, from 1.
    """

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def filled(self) -> str:
        """Return the code with the embedded pair for the names that a reader fills in."""
        return re.sub(rf"\b({'|'.join(PLACES)})\b(?!=)", lambda found: PLACES[found[0]], self.code)

    @property
    def commands(self) -> list[list[str]]:
        """Split a ``bash`` block into commands, without comments and variables."""
        text = self.filled.replace("\\\n", " ")
        found = []
        for line in _lines(text):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0], re.S):
                words = words[1:]
            if words:
                found.append(words)
        return found


def _lines(text: str) -> list[str]:
    """Split commands; one goes on where a quote is open."""
    found, open_line = [], ""
    for line in text.splitlines():
        open_line = f"{open_line}\n{line}" if open_line else line
        try:
            shlex.split(open_line, comments=True)
        except ValueError:
            continue
        found.append(open_line)
        open_line = ""
    if open_line:
        raise ValueError(f"a quote is not closed: {open_line}")
    return found


def pages() -> list[Path]:
    docs = (ROOT / "docs").rglob("*.md")
    others = ("README.md", "CONTRIBUTING.md", "patches/README.md", "examples/README.md")
    more = (ROOT / "examples").glob("*/README.md")
    return sorted({*docs, *(ROOT / name for name in others), *more})


def blocks() -> list[Block]:
    found = []
    for path in pages():
        text, page = path.read_text(), str(path.relative_to(ROOT))
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            code = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
            found.append(Block(page, line, match[2], code))
    return found
