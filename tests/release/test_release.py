"""Promise: what is released is whole. The wheel has every module and nothing else, says who and
which version it is, and serves from where it is installed, away from this tree.

The same functions are the checklist's (``tools/release.py``), which installs the wheel beside a
stock vLLM in an environment of its own; here it comes before the checkout's in this one.
"""

import os
import subprocess
import sys
import zipfile

import pytest

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


def test_a_wheel_that_lacks_a_module_is_noticed(dist, tmp_path):
    wheel = next(dist.glob("*.whl"))
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / wheel.name, "w") as less:
        for name in whole.namelist():
            if name != "vllm_triforce/kernels/draw.py":
                less.writestr(name, whole.read(name))
    (tmp_path / next(dist.glob("*.tar.gz")).name).symlink_to(next(dist.glob("*.tar.gz")))
    with pytest.raises(release.Failed, match=r"lacks .*kernels/draw\.py"):
        release.check_contents(tmp_path)


def test_the_wheel_serves_and_its_commands_answer(dist, tmp_path):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert "TriForce metrics: Mean acceptance length" in release.smoke(python, tmp_path)
    done = subprocess.run(
        [python, "-m", "vllm_triforce.cli", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr


def test_one_place_says_the_version():
    import vllm_triforce

    assert vllm_triforce.__version__ == release.package_version()
    setup = (ROOT / "setup.cfg").read_text()
    assert "version = attr: vllm_triforce.__version__" in setup
    assert f"## {release.package_version()}," in (ROOT / "CHANGELOG.md").read_text()
    assert release.vllm_pin() == "vllm>=0.32.0,<0.34"


def test_the_checklist_names_its_points():
    done = subprocess.run(
        [sys.executable, "tools/release.py", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    listed = [line.split(":")[0].strip() for line in done.stdout.splitlines()]
    assert listed == list(release.CHECKS)
