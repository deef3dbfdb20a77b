"""Promise: with patches/speculative-method-registry.diff, vLLM needs none of the wrappers.

The diff is applied to a copy of the installed vLLM; its own tests pass, and TriForce runs as a
registered method on vLLM's own worker, with the same tokens as stock vLLM.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.contract import contract
from tests.models import ROOT
from tests.registry.overlay import patched_vllm, touched_files
from tests.registry.run_case import MARKER

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
    done = subprocess.run(
        [sys.executable, "-m", "tests.registry.run_case", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARKER)]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return {"folder": str(folder), **json.loads(lines[0].removeprefix(MARKER))}


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
