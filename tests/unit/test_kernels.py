"""Promise: every Triton kernel equals its oracle. Without a GPU they run in Triton's interpreter,
which must be in place before vLLM is imported: hence a process of its own."""

import sys

import pytest

from tests.child import run
from tests.v2.environment import needs_interpreter, v2_environment


@pytest.mark.slow
@needs_interpreter
def test_kernels_in_the_interpreter():
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kernels")
    said = run(*command, env=v2_environment(), timeout=1800).stdout
    assert "skipped" not in said, said[-300:]
