"""Promise: what both runners promise (cases.py), on Model Runner V2: other models and engine
settings. A file of its own, since each has a child process and half of the time."""

import pytest

from tests.parity.cases import CASES, cases_of, has_own_settings
from tests.parity.checks import check_all
from tests.v2.environment import needs_interpreter

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_interpreter]


@pytest.mark.parametrize("name", cases_of("device", has_own_settings))
def test_promise(device, jobs, stock, name):
    check_all(CASES[name], jobs[name], device.outcome(jobs[name]), stock)
