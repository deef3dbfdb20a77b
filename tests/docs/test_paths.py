"""Promise: files and folders that the pages name are there, in this repository or in vLLM; llms.txt
has the form of llmstxt.org and names every page."""

import re
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models import ROOT

PAGES = sorted(ROOT.glob("docs/**/*.md")) + [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "patches/README.md")
]
# Names with an ending of sources, and names with a slash at the end: no models of the hub. JSON
# files without a folder are results.
PATH = re.compile(
    r"`((?:[\w.<>*-]+/)*[\w.<>*-]+\.(?:py|md|diff|sh|toml|ya?ml|cfg)"
    r"|(?:[\w.<>*-]+/)+(?:[\w.<>*-]+\.json)?)`"
)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
# Folders that commands make.
MADE = {"logs/"}
# Neither pages nor sources of ours: links, and folders that are written.
SKIPPED = {".git", ".venv", "build", "__pycache__"}


@cache
def ours() -> list[str]:
    """List the files and folders of the repository, with a slash before and after each."""
    found, folders = [], [ROOT]
    for folder in folders:
        for path in folder.iterdir():
            if path.name not in SKIPPED:
                found.append(f"/{path.relative_to(ROOT)}/")
                if path.is_dir() and not path.is_symlink():
                    folders.append(path)
    return found


def exists(name: str) -> bool:
    if name.startswith("vllm/"):
        (vllm,) = find_spec("vllm").submodule_search_locations
        return (Path(vllm).parent / name).exists()
    end = re.sub(r"<\w+>", "*", f"*/{name.rstrip('/')}/")
    return any(fnmatchcase(path, end) for path in ours())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_lead_somewhere(page):
    names = set(PATH.findall(FENCE.sub("", page.read_text()))) - MADE
    assert not [name for name in sorted(names) if not exists(name)]


TEXT = (ROOT / "llms.txt").read_text()
LINK = re.compile(r"^- \[[^\]]+\]\(([^)\s]+)\): \S", re.M)


def test_title_summary_and_sections_of_links():
    title, summary, *_ = TEXT.split("\n\n")
    assert title == "# vllm-triforce"
    assert all(line.startswith("> ") for line in summary.splitlines())
    first, *sections = re.split(r"^## ", TEXT, flags=re.M)
    assert "](" not in first and len(sections) > 2
    for section in sections:
        title, _, items = section.partition("\n\n")
        for item in re.split(r"\n(?=- )", items.strip()):
            assert LINK.match(item), (title, item)


def test_every_page_is_listed_and_every_link_leads_somewhere():
    links = LINK.findall(TEXT)
    assert len(links) == len(set(links))
    assert not [link for link in links if not (ROOT / link).is_file()]
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")}
    assert pages - set(links) == {"docs/index.md"}
