"""Promise: what Model Runner V2 does in its own way keeps what both runners promise.

Triton's interpreter must be in place before vLLM is imported: hence a process of its own.
"""

import sys

import pytest

from tests.child import run
from tests.models import PAIR
from tests.v2.environment import needs_interpreter, v2_environment


@pytest.mark.engine
@pytest.mark.slow
@needs_interpreter
def test_runner_v2_in_the_interpreter():
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    run(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/v2"),
        env=v2_environment(),
        timeout=1800,
    )
