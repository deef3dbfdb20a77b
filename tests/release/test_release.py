"""Promise: what is released is whole. The wheel has every module and nothing else, says who and
which version it is, and serves from where it is installed, away from this tree.

The same functions are the checklist's (``tools/release.py``), which installs the wheel beside a
stock vLLM in an environment of its own; here it comes before the checkout's in this one.
"""

import sys
import zipfile

import pytest

import vllm_triforce
from tests.child import run
from tests.models import ROOT
from tools import release

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    # Without the network: with the setuptools that is here.
    release.build_into(folder, "--no-build-isolation", "--python", sys.executable)
    return folder


def test_contents_and_metadata(dist):
    release.check_contents(dist)
    wheel = next(dist.glob("*.whl"))
    assert wheel.name == f"vllm_triforce-{release.package_version()}-py3-none-any.whl"


@pytest.mark.thorough
def test_the_wheel_serves_and_its_commands_answer(dist, tmp_path):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert "TriForce metrics: Mean acceptance length" in release.smoke(python, tmp_path)
    assert "doctor" in run(python, "-m", "vllm_triforce.cli", "--help", cwd=tmp_path).stdout


def test_one_place_says_the_version():
    assert vllm_triforce.__version__ == release.package_version()
    setup = (ROOT / "setup.cfg").read_text()
    assert "version = attr: vllm_triforce.__version__" in setup
    assert f"## {release.package_version()}," in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {release.package_version()}" in (ROOT / "CITATION.cff").read_text()
    assert release.vllm_pin() == "vllm>=0.32.0,<0.34"
