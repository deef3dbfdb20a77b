"""What both runners are compared with, and on."""

import pytest

from tests.images import install
from tests.models import PAIR
from tests.parity.cases import CASES
from tests.parity.device import Device
from tests.parity.models import make_models
from tests.parity.running import make_job
from tests.parity.stock import Stock


@pytest.fixture(scope="module", autouse=True)
def _without_compiler(ranks_without_compiler):
    """For every case."""


@pytest.fixture(scope="session")
def parity_models(tmp_path_factory, gqa_pair):
    install()
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    return make_models(tmp_path_factory.mktemp("parity"), gqa_pair)


@pytest.fixture(scope="session")
def stock(engines) -> Stock:
    return Stock(engines)


@pytest.fixture(scope="module")
def jobs(request, parity_models, stock) -> dict:
    """The selected cases of this file, by name."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and not any(item.iter_markers("skip"))
    ]
    return {name: make_job(CASES[name], parity_models, stock) for name in names}


@pytest.fixture(scope="module")
def device(jobs, tmp_path_factory):
    device = Device(list(jobs.values()), tmp_path_factory.mktemp("device"))
    yield device
    device.close()
