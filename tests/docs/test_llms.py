"""Promise: llms.txt has the form of llmstxt.org, and names every page of the documentation."""

import re

from tests.models import ROOT

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
