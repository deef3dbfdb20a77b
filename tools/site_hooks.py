"""mkdocs hooks of the documentation site; ``mkdocs.yml`` names this file.

- Files outside ``docs`` (``ROOT_PAGES``) become pages of the site.
- Pages are read in the repository too. A link to a file that is a page of the site leads to that
  page, and a link to any other file becomes the file's name, since the site has no address for it.
- Drawings (``docs/drawings/*.svg``) are inlined, so that they take the colours of the page.
- A ``<picture>`` with a light and a dark file follows the page's switch, not the system's.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]

# Files below the project's root, and their pages.
ROOT_PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "patches/README.md": "project/patches.md",
    "examples/README.md": "project/examples.md",
    "examples/models/README.md": "project/models.md",
    "examples/prompts/README.md": "project/prompts.md",
    "examples/custom_policy/README.md": "project/custom-policy.md",
    "examples/deployment/README.md": "project/deployment.md",
    "examples/train_head/README.md": "project/train-head.md",
    # The site has another home page.
    "README.md": "index.md",
}
_README = "README.md"

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(((?:\.\./)*drawings/[\w-]+\.svg)\)$", re.M)

_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)


def on_files(files, config):
    """Add the pages that are not files below ``docs``."""
    for source, page in ROOT_PAGES.items():
        path = ROOT / source
        if source != _README and path.is_file():
            files.append(File.generated(config, page, content=path.read_text()))
    for file in files.static_pages():
        if file.src_uri.startswith("drawings/") and not file.src_uri.endswith("icon.svg"):
            file.inclusion = InclusionLevel.EXCLUDED
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links and inline drawings outside fenced code."""
    source = _source_of(page.file.src_uri)
    pages = {_source_of(file.src_uri): file.src_uri for file in files.documentation_pages()}
    if _README not in pages:
        pages[_README] = ROOT_PAGES[_README]

    def rewrite(text: str) -> str:
        text = _DRAWING.sub(lambda match: _drawing(match[1], match[2], source), text)
        text = _PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", text)
        return _LINK.sub(lambda match: _link(match, source, page.file.src_uri, pages), text)

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [rewrite(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, rewrite(markdown[end:])])


def _source_of(page: str) -> str:
    """Return the source file of a page, below the project's root."""
    sources = [source for source, name in ROOT_PAGES.items() if name == page and source != _README]
    return sources[0] if sources else f"docs/{page}"


def _link(match: re.Match, source: str, page: str, pages: dict[str, str]) -> str:
    text, address = match[1], match[2]
    if re.match(r"[a-z]+:|#|/", address):
        return match[0]
    name, _, anchor = address.partition("#")
    folder = posixpath.dirname(source)
    target = posixpath.normpath(posixpath.join(folder, name))
    if target in pages:
        relative = posixpath.relpath(pages[target], posixpath.dirname(page) or ".")
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"
    path = ROOT / target
    if not path.exists() or _is_of_site(target):
        return match[0]  # mkdocs copies the file, or reports that it is missing
    return text if "`" in text or text == target else f"{text} (`{target}`)"


def _is_of_site(target: str) -> bool:
    return target.startswith("docs/") and (ROOT / target).is_file()


def _drawing(text: str, address: str, source: str) -> str:
    path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(source), address))
    svg = re.sub(r"\s*\n\s*", " ", path.read_text()).strip()
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f'<figure class="drawing">{svg}</figure>'
