"""What both runners are compared with, and on."""

import pytest

from tests.models import PAIR
from tests.parity.checks import By
from tests.parity.models import Exact, make_models
from tests.parity.stock import Stock


@pytest.fixture(scope="module", autouse=True)
def _without_compiler(ranks_without_compiler):
    """For every case."""


@pytest.fixture(scope="session")
def parity_models(tmp_path_factory, gqa_pair):
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    return make_models(tmp_path_factory.mktemp("parity"), gqa_pair)


@pytest.fixture(scope="session")
def by(engines) -> By:
    return By(Stock(engines), Exact())
