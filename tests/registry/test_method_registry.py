"""Promise: with patches/speculative-method-registry.diff, vLLM needs none of the wrappers.

The diff is applied to a copy of the installed vLLM; its own tests pass, and TriForce runs as a
registered method on vLLM's own worker, with the same tokens as stock vLLM.
"""

import os

import pytest

from tests.child import results_of
from tests.contract import contract
from tests.models import ROOT
from tests.registry.overlay import patched_vllm, touched_files

pytestmark = [pytest.mark.engine, pytest.mark.thorough]

DIFF = ROOT / "patches" / "speculative-method-registry.diff"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("patched") / "site"
    patched_vllm(contract.installed(), DIFF, folder)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "VLLM_PLUGINS": "",  # not ours: it would wrap
    }
    found = results_of("tests.registry.run_case", str(folder), cwd=folder, env=environment)
    return {"folder": str(folder), **found}


def test_the_diff_passes_its_own_tests(results):
    assert results["vllm"].startswith(results["folder"])
    assert results["own_tests"] == 0


def test_triforce_runs_registered_on_stock_workers(results):
    assert results["same"]
    assert results["worker"] == "CPUWorker" and not results["wrapped"]
    assert results["num_lookahead_tokens"] == 6
    assert results["num_proposals"] > 0 and results["num_accepted"] > 0


def test_the_installed_vllm_is_left_alone():
    added = contract.installed() / "v1" / "spec_decode" / "registry.py"
    assert not added.exists(), "vLLM has a registry of its own: use it, and delete the diff"
    assert any(path.name == "registry.py" for path in touched_files(DIFF))
