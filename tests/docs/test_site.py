"""Promise: the documentation site builds, from what is here alone.

``mkdocs build --strict`` turns warnings of broken links and anchors into errors (mkdocs.yml).
"""

import importlib.util
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.child import run
from tests.models import ROOT

NEEDED = ("mkdocs", "material", "mkdocstrings")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not installed; pip install '.[dev]'"
)

# Files that a browser loads by itself, in HTML and CSS; and links.
LOADED = re.compile(r"""<(?:script|img|source|iframe|link|use)\b[^>]*?\b(?:src|href)="([^"]*)\"""")
LOADED_BY_CSS = re.compile(r"""url\(['"]?([^'")]+)""")
LINK = re.compile(r'<a\b[^>]*?\bhref="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    run(*command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_nothing_is_loaded_from_elsewhere(site):
    for pattern, name in ((LOADED, "*.html"), (LOADED_BY_CSS, "*.css")):
        addresses = {a for path in site.rglob(name) for a in pattern.findall(path.read_text())}
        assert addresses and not [a for a in addresses if urlsplit(a).netloc]


def test_sources_that_are_not_pages_are_no_links(site):
    links = {link for path in site.rglob("*.html") for link in LINK.findall(path.read_text())}
    inner = [parts.path for link in links if not (parts := urlsplit(link)).scheme]
    assert len(inner) > 30
    assert not [path for path in inner if path.endswith((".py", ".md", ".cfg", ".sh"))]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_root_lead_somewhere(page):
    for address in re.findall(r"\]\(([^)\s#]+)", (ROOT / page).read_text()):
        if not urlsplit(address).scheme:
            assert (ROOT / address).exists(), f"{page}: {address}"
