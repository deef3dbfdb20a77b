"""Promise: the forms of issues are whole, and ask for what Troubleshooting asks for."""

import re

import pytest
import yaml

from tests.models import ROOT

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
