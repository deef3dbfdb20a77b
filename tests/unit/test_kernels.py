"""Promise: every Triton kernel equals its oracle. Without a GPU they run in Triton's interpreter,
which must be in place before vLLM is imported: hence a process of its own."""

import subprocess
import sys

import pytest

from tests.models import ROOT
from tests.v2.environment import needs_interpreter, v2_environment


@pytest.mark.slow
@needs_interpreter
def test_kernels_in_the_interpreter():
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kernels"],
        cwd=ROOT,
        env=v2_environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert "skipped" not in child.stdout, child.stdout[-300:]
