"""Collect these tests in Triton's interpreter, which test_in_interpreter.py starts."""

import pytest

from tests.kernels.device import INTERPRETED
from tests.v2.engine import EnginesV2

collect_ignore = ["test_in_interpreter.py" if INTERPRETED else "test_runner_v2.py"]


@pytest.fixture(scope="session")
def engines() -> EnginesV2:
    return EnginesV2()
