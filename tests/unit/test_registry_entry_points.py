"""Promise: another installed package adds a policy or a source of drafts by an entry point; it is
known by its name without being loaded, and never takes the place of one that is there."""

import sys
from collections.abc import Callable

import pytest

from tests.conftest import triforce
from tests.packages import BROKEN, GROUP, POLICY, put_project
from tests.refusals import engine_config
from vllm_triforce.config import TriForceConfig, checks, draft_sources, triforce_config
from vllm_triforce.registry import Registry
from vllm_triforce.selection import POLICIES

SOURCES = "vllm_triforce.draft_sources"


def policies() -> Registry:
    """Make the registry of vllm_triforce/selection anew, over the installed projects."""
    return Registry("vllm_triforce.selection", ("policy", "SelectionPolicy"), GROUP)


@pytest.fixture
def install(tmp_path, monkeypatch) -> Callable[..., None]:
    """Put projects with entry points and one module on the path."""

    def put(name: str, entry_points: dict[str, str], module: str = POLICY, group: str = GROUP):
        monkeypatch.syspath_prepend(put_project(tmp_path, name, entry_points, module, group))

    yield put
    for module in [name for name in sys.modules if name.endswith("_module")]:
        del sys.modules[module]


def test_a_policy_of_another_package_is_known_and_loaded_when_asked_for(install):
    install("mine", {"newest": "mine_module:Newest"})
    found = policies()
    assert "newest" in found and {"retrieval", "quest", "streaming"} < {*found}
    assert "mine_module" not in sys.modules
    assert found["retrieval"] is POLICIES["retrieval"]
    assert "mine_module" not in sys.modules
    assert found["newest"].name == "newest" and found["newest"] is found["newest"]


def test_a_class_without_a_method_is_refused(install):
    install("mine", {"open": "mine_module:Open"})
    with pytest.raises(ValueError, match=r"Open lacks \['score'\]"):
        policies()["open"]


def test_a_taken_name_is_refused(install):
    install("mine", {"quest": "mine_module:Newest"})
    with pytest.raises(ValueError, match=r"mine adds 'quest' to .*vllm-triforce has one .* Rename"):
        policies()["retrieval"]


def test_configuration_knows_it(install, monkeypatch):
    install("mine", {"newest": "mine_module:Newest"})
    install("source", {"repeat": "source_module:Repeat"}, "", SOURCES)
    sources = Registry("vllm_triforce.runner_v1.sources", ("source", "DraftSource"), SOURCES)
    monkeypatch.setattr(triforce_config, "POLICIES", policies())
    monkeypatch.setattr(draft_sources, "SOURCES", sources)
    assert TriForceConfig(selection="newest", draft_sources="repeat").selection == "newest"
    names = "'newest' or 'quest' or 'retrieval' or 'streaming', or install the package that has it"
    with pytest.raises(ValueError, match=names):
        TriForceConfig(selection="eldest")
    assert not {"mine_module", "source_module"} & {*sys.modules}


def test_a_broken_policy_is_refused_with_the_configuration(install, monkeypatch, gqa_pair):
    """The message names the fault before a model is loaded."""
    install("broken", BROKEN)
    monkeypatch.setattr(triforce_config, "POLICIES", policies())
    monkeypatch.setattr(checks, "POLICIES", triforce_config.POLICIES)
    reasons = ["with name = 'misnamed'. Give the class", "'Oldest'", "No module named 'no_s"]
    for name, reason in zip(BROKEN, reasons):
        with pytest.raises(ValueError) as refused:
            engine_config(gqa_pair["target"], triforce(selection=name))
        said = str(refused.value)
        assert said.startswith(f"selection={name!r}: {BROKEN[name]} of broken ") and reason in said
    config = engine_config(gqa_pair["target"], triforce(selection="quest"))
    assert config.additional_config["triforce"]["selection"] == "quest"
