"""Promise: what both runners promise (cases.py), on Model Runner V2: all but other models and
engine settings (test_device_settings.py)."""

import pytest

from tests.parity.cases import CASES, cases_of, has_own_settings
from tests.parity.checks import check_all
from tests.v2.environment import needs_interpreter

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_interpreter]


@pytest.mark.parametrize("name", cases_of("device", lambda case: not has_own_settings(case)))
def test_promise(device, jobs, stock, name):
    check_all(CASES[name], jobs[name], device.outcome(jobs[name]), stock)
