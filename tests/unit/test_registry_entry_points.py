"""Promise: another installed package adds a policy or a source of drafts by an entry point; it is
known by its name without being loaded, and never takes the place of one that is there."""

import sys
from collections.abc import Callable

import pytest

from vllm_triforce.config.draft_sources import DEVICE_SOURCES, SOURCES
from vllm_triforce.registry import Registry
from vllm_triforce.selection import POLICIES

GROUP = "vllm_triforce.selection_policies"
POLICY = """
from vllm_triforce.selection import SelectionPolicy

class Newest(SelectionPolicy):
    name = "newest"

    def score(self, query, summaries, num_chunks):
        raise NotImplementedError

class Open(SelectionPolicy):
    name = "open"
"""


def policies() -> Registry:
    """As vllm_triforce/selection makes it, of what is installed now."""
    return Registry("vllm_triforce.selection", POLICIES._base, ["summaries"], POLICIES._group)


@pytest.fixture
def install(tmp_path, monkeypatch) -> Callable[..., None]:
    """Puts a project with entry points on the path, and its one module."""

    def put(name: str, entry_points: dict[str, str], module: str = POLICY, group: str = GROUP):
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}_module.py").write_text(module)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(folder)

    yield put
    for module in [name for name in sys.modules if name.endswith("_module")]:
        del sys.modules[module]


def test_groups_are_those_that_are_documented():
    assert POLICIES._group == GROUP
    assert SOURCES._group == "vllm_triforce.draft_sources"
    assert DEVICE_SOURCES._group == "vllm_triforce.device_draft_sources"


def test_a_policy_of_another_package_is_known_and_loaded_when_asked_for(install):
    install("mine", {"newest": "mine_module:Newest"})
    found = policies()
    assert "newest" in found and {"retrieval", "quest", "streaming"} < {*found}
    assert "mine_module" not in sys.modules
    assert found["retrieval"] is POLICIES["retrieval"]
    assert "mine_module" not in sys.modules
    assert found["newest"].name == "newest" and found["newest"] is found["newest"]


def test_what_is_broken_harms_only_who_asks_for_it(install):
    install("mine", {"newest": "mine_module:Newest"}, module="import no_such_module")
    found = policies()
    assert found["quest"].name == "quest"
    with pytest.raises(ValueError, match=r"mine_module:Newest of mine does not load .*no_such_mod"):
        found["newest"]


@pytest.mark.parametrize(
    "entry_points, asked, says",
    [
        ({"newest": "mine_module:Oldest"}, "newest", "does not load"),
        ({"latest": "mine_module:Newest"}, "latest", "no class over SelectionPolicy with name = "),
        ({"newest": "mine_module:SelectionPolicy"}, "newest", "name the class's name as its entry"),
        ({"open": "mine_module:Open"}, "open", r"Open lacks \['score'\]"),
    ],
)
def test_what_is_no_policy_is_refused(install, entry_points, asked, says):
    install("mine", entry_points)
    with pytest.raises(ValueError, match=says):
        policies()[asked]


def test_a_name_that_is_taken_is_refused_whatever_is_asked_for(install):
    """By a policy of ours, or by another package: who is meant would be a matter of chance."""
    install("mine", {"quest": "mine_module:Newest"})
    with pytest.raises(ValueError, match=r"mine adds 'quest' to .*vllm-triforce has one .* rename"):
        policies()["retrieval"]


def test_two_packages_with_one_name_are_refused(install):
    install("mine", {"newest": "mine_module:Newest"})
    install("theirs", {"newest": "theirs_module:Newest"})
    with pytest.raises(ValueError, match=r"(mine|theirs) adds 'newest' .*(mine|theirs) has one"):
        policies()["retrieval"]


def test_configuration_knows_it(install, monkeypatch):
    from vllm_triforce.config import TriForceConfig, asked, draft_sources

    install("mine", {"newest": "mine_module:Newest"})
    install("source", {"repeat": "source_module:Repeat"}, "", "vllm_triforce.draft_sources")
    sources = Registry("vllm_triforce.host.sources", SOURCES._base, (), SOURCES._group)
    monkeypatch.setattr(asked, "POLICIES", policies())
    monkeypatch.setattr(draft_sources, "SOURCES", sources)
    assert TriForceConfig(selection="newest", draft_sources="repeat").selection == "newest"
    with pytest.raises(ValueError, match="'newest' or 'quest' or 'retrieval' or 'streaming'"):
        TriForceConfig(selection="eldest")
    assert not {"mine_module", "source_module"} & {*sys.modules}
