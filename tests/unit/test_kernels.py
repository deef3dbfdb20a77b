"""Promise: every Triton kernel equals its oracle. Without a GPU they run in Triton's interpreter,
which must be in place before vLLM is imported: hence a process of its own."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.models import ROOT


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton; pip install triton==3.9.0 (its interpreter is used)",
)
def test_kernels_in_the_interpreter():
    support = [str(ROOT / "tests" / "v2" / "support"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, support)),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kernels"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert "skipped" not in child.stdout, child.stdout[-300:]
