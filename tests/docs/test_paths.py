"""Promise: files and folders that the pages name are there, in this repository or in vLLM."""

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


def test_paths_are_found_and_missed():
    text = "`kernels/draw.py`, `a/<name>.py`, `docs/`, `Qwen/Qwen3-8B`, `results.json`, `vllm/a.py`"
    assert PATH.findall(text) == ["kernels/draw.py", "a/<name>.py", "docs/", "vllm/a.py"]
    assert exists("kernels/draw.py") and exists("selection/<name>.py") and exists("runner_v2/")
    assert exists("vllm/v1/engine/core.py")
    assert not any(map(exists, ("kernels/noise.py", "a/<name>.py", "ernels/draw.py", "vllm/a.py")))
