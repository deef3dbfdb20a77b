"""Promise: what both runners promise (cases.py), on Model Runner V1."""

import pytest

from tests.parity.cases import CASES, cases_of
from tests.parity.checks import check_all
from tests.parity.host import Host
from tests.parity.running import make_job, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("name", cases_of("host"))
def test_promise(engines, parity_models, stock, name):
    job = make_job(CASES[name], parity_models, stock)
    check_all(CASES[name], job, run(job, Host(engines)), stock)
