"""The kernels' own tests, on this device rather than interpreted; each test is an item.

A test that spoils the device for the process (an error of CUDA) is one: the rest is run in a new
process.
"""

import sys

import pytest

from vllm_triforce_bench.gpu_suite.engine import argument_parser
from vllm_triforce_bench.gpu_suite.items import NO_END, Items, start_anew

# How PyTorch and Triton name errors after which nothing works any more.
SPOILS = ("CUDA error", "AcceleratorError", "Triton Error [CUDA]")
# With so many errors it is not worth a new process for each.
MOST_ERRORS = 5


class Recorder:
    """A plugin of pytest: leaves out what is done, and writes down what becomes of the rest."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._seconds = 0.0
        self.is_spoilt = False

    def pytest_collection_modifyitems(self, items: list) -> None:
        names = [item.nodeid for item in items]
        for name in filter(self._items.has_no_end, names):
            self._items.fail(name, NO_END)
        missing = set(self._items.missing(names))
        items[:] = [item for item in items if item.nodeid in missing]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self._items.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self._items.fail(report.nodeid, report.longreprtext[-1500:])
            self.is_spoilt |= any(name in report.longreprtext for name in SPOILS)
        elif report.when == "teardown" and self._items.missing([report.nodeid]):
            found = {"outcome": "passed", "seconds": round(self._seconds, 2)}
            self._items.put(report.nodeid, found)
        elif report.skipped:
            self._items.put(report.nodeid, {"outcome": "skipped"})

    def pytest_runtest_logfinish(self) -> None:
        if self.is_spoilt:
            pytest.exit("the device is of no use to this process any more", returncode=1)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folder", help="of the tests")
    args = parser.parse_args()
    items = Items(args.result)
    recorder = Recorder(items)
    code = pytest.main(["-q", "-p", "no:cacheprovider", args.folder], plugins=[recorder])
    if recorder.is_spoilt and items.num_errors < MOST_ERRORS:
        start_anew()
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED  # all are done
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, nothing):
        sys.exit(int(code))
    sys.exit(int(items.num_errors > 0 or not items.found))


if __name__ == "__main__":
    main()
