"""Fixtures of most files here; a file with settings of its own defines its own ``llm``."""

import pytest

from tests.conftest import triforce
from tests.models import PAIR, held_out_tokens


@pytest.fixture(scope="module")
def stock(engines, pair):
    return engines.get(pair["target"])


@pytest.fixture(scope="module")
def llm(engines, pair):
    """Level 2 selects seldom, so that some of its tokens are rejected."""
    keys = triforce(model=pair["draft"], retrieval_budget=256)
    return engines.get(pair["target"], keys)


@pytest.fixture(scope="session")
def text() -> list[int]:
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    return held_out_tokens(12000)
