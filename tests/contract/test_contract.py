"""Promise: what we lean on in vLLM is named, and when it moves a test says what moved.

Source alone is read, so vLLM 0.33.0 is checked without being installed: the facts of its source
are kept in vllm-0.33.0.json (``tools/vllm_facts.py``).
"""

import pytest

from tests.contract import contract, source
from tests.contract.surface import calls, derives, does, has, offers, overrides

NEXT_RELEASE = "0.33.0"


def test_installed_vllm_keeps_the_contract():
    facts = contract.facts_of(contract.installed(), "the installed one")
    assert not (moved := contract.complaints(facts)), "\n".join(moved)


def test_next_release_keeps_the_contract():
    assert not (moved := contract.complaints(contract.load(NEXT_RELEASE))), "\n".join(moved)


def test_every_file_that_imports_vllm_is_in_the_table():
    """Imports alone say little: signatures, attributes and order are the table's."""
    users = {surface.user for surface in contract.TABLE}
    loners = contract.users_of_more_than_a_name() - users
    assert not loners, f"{loners} import vLLM: add what they lean on to tests/contract/table_*.py"
    assert not {user for user in users if not (contract.ROOT / user).exists()}


def test_no_entry_is_said_twice():
    said = [(s.file, s.name, s.wanted, s.judge, s.user) for s in contract.TABLE]
    assert len(said) == len(set(said))


HOST = """
from elsewhere import Helper
if True:
    FLAG = 1

class Base:
    shared: int = 0

class Runner(Base):
    name: str
    size = 3

    def __init__(self, config, *, device=None):
        self.config, self.table = config, None
        if config:
            self.handler: Handler = Handler(device)

    def step(self, tokens, seed=0, **extra):
        assert isinstance(self.handler, Handler | Other)
        self.handler.begin()
        self.handler.propose(tokens)
        self.result = tokens
"""


def judged(surface, text: str = HOST) -> str | None:
    facts = source.file_facts(text)
    return surface.judge(
        surface, {**facts, "events": {surface.name: source.events(text, "Runner.step")}}
    )


KEPT = [
    overrides("f", "Runner.step", "self, tokens, seed=, **extra", "u"),
    overrides("f", "Runner.__init__", "self, config, *, device=", "u"),
    calls("f", "Runner.__init__", "config, device=", "u"),
    calls("f", "Runner.step", "tokens=, seed=, anything=", "u"),
    has("f", "Runner", "name size config table handler result step", "u"),
    derives("f", "Runner", "Base", "u"),
    offers("f", "Helper FLAG Base", "u"),
    does(
        "f",
        "Runner.step",
        "isinstance(self.handler, Other) < self.handler.begin( < self.result =",
        "u",
    ),
]
MOVED = [
    (overrides("f", "Runner.step", "self, tokens, **extra", "u"), "seed="),
    (overrides("f", "Runner.stop", "self", "u"), "gone"),
    (calls("f", "Runner.__init__", "device=", "u"), "wants ['config']"),
    (calls("f", "Runner.__init__", "config, device, ", "u"), "by place"),
    (calls("f", "Runner.__init__", "config, dtype=", "u"), "no longer ['dtype']"),
    (has("f", "Runner", "name tables", "u"), "tables"),
    (has("f", "Runner", "shared", "u"), "shared"),
    (derives("f", "Runner", "Helper", "u"), "derives from ['Base']"),
    (offers("f", "FLAG OTHER", "u"), "OTHER"),
    (
        does("f", "Runner.step", "self.handler.propose( < self.handler.begin(", "u"),
        "after 'self.handler.propose('",
    ),
    (does("f", "Runner.step", "isinstance(self.handler, Third)", "u"), "Third"),
]


@pytest.mark.parametrize("surface", KEPT, ids=lambda s: f"{s.judge.__name__}-{s.wanted}")
def test_what_stays_is_not_complained_about(surface):
    assert judged(surface) is None


@pytest.mark.parametrize("surface, says", MOVED, ids=lambda s: getattr(s, "wanted", s))
def test_what_moved_is_named(surface, says):
    assert says in judged(surface)


def test_a_file_an_import_or_a_fact_that_is_missing_is_named():
    facts = contract.load(NEXT_RELEASE)
    facts["files"]["v1/outputs.py"] = None
    del facts["files"]["config/vllm.py"]
    del facts["modules"]["logger"]
    facts["modules"]["forward_context"] = "ForwardContext"
    told = "\n".join(contract.complaints(facts))
    assert (
        "vllm/v1/outputs.py: DraftTokenIds the file is gone (vllm_triforce/runner_v2/speculator.py)"
        in told
    )
    assert "vllm/config/vllm.py: VllmConfig is not in the kept facts: run python tools" in told
    assert "vllm.logger is not in the kept facts" in told
    assert "vllm.forward_context no longer offers set_forward_context" in told
