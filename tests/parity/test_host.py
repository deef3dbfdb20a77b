"""Promise: what both runners promise (cases.py), on Model Runner V1."""

import pytest

from tests.parity.cases import CASES, THOROUGH
from tests.parity.checks import check_all
from tests.parity.host import Host
from tests.parity.running import make_job

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH["host"]))
        for name, case in CASES.items()
        if "host" not in case.skip
    ],
)
def test_promise(engines, parity_models, by, name):
    case = CASES[name]
    job = make_job(case, parity_models, by.stock)
    check_all(case, job, Host(engines).outcome(job), by)
