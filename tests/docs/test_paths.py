"""Promise: files and folders that the pages name are there, in this repository or in vLLM; llms.txt
has the form of llmstxt.org and names every page; forms of issues are whole, and ask for what
Troubleshooting asks for."""

import re
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

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


def test_paths_are_found_and_missed():
    text = "`kernels/draw.py`, `a/<name>.py`, `docs/`, `Qwen/Qwen3-8B`, `results.json`, `vllm/a.py`"
    assert PATH.findall(text) == ["kernels/draw.py", "a/<name>.py", "docs/", "vllm/a.py"]
    assert exists("kernels/draw.py") and exists("selection/<name>.py") and exists("runner_v2/")
    assert exists("vllm/v1/engine/core.py")
    assert not any(map(exists, ("kernels/noise.py", "a/<name>.py", "ernels/draw.py", "vllm/a.py")))


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


FOLDER = ROOT / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(set(FOLDER.glob("*.yml")) - {FOLDER / "config.yml"})
TYPES = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_whole(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"] and form["labels"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in form["body"]} <= TYPES
    assert all(part["attributes"]["label"] for part in fields)
    ids = [part["id"] for part in fields]
    assert len(ids) == len(set(ids))
    assert any(part.get("validations", {}).get("required") for part in fields)
    for link in re.findall(r"\.\./blob/HEAD/([^)#]+)", path.read_text()):
        assert (ROOT / link).is_file()


def test_the_bug_form_asks_for_the_report():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    command = "vllm-triforce doctor TARGET --report fault.json"
    assert command in page and command in (FOLDER / "bug.yml").read_text()


def test_links_beside_the_forms():
    config = yaml.safe_load((FOLDER / "config.yml").read_text())
    assert all(
        link["url"].startswith("https://") and link["about"] for link in config["contact_links"]
    )
