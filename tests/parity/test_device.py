"""Promise: what both runners promise (cases.py), on Model Runner V2."""

import pytest

from tests.parity.cases import CASES, THOROUGH
from tests.parity.checks import check_all
from tests.parity.device import Device
from tests.parity.running import make_job
from tests.v2.environment import needs_interpreter

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_interpreter]


@pytest.fixture(scope="module")
def jobs(request, parity_models, by) -> dict:
    """Of the cases that were asked for."""
    return {
        item.callspec.params["name"]: make_job(
            CASES[item.callspec.params["name"]], parity_models, by.stock
        )
        for item in request.session.items
        if item.path == request.path and not any(item.iter_markers("skip"))
    }


@pytest.fixture(scope="module")
def device(jobs, tmp_path_factory):
    device = Device(list(jobs.values()), tmp_path_factory.mktemp("device"))
    yield device
    device.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.skip(reason) for at, reason in case.skip.items() if at == "device"]
            + [pytest.mark.thorough] * (name in THOROUGH["device"]),
        )
        for name, case in CASES.items()
    ],
)
def test_promise(device, jobs, by, name):
    job = jobs[name]
    check_all(CASES[name], job, device.outcome(job), by)
