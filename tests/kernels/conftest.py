"""Collect these tests on a GPU, or in Triton's interpreter (tests/unit/test_kernels.py)."""

from tests.kernels.device import DEVICE, INTERPRETED

if DEVICE.type == "cpu" and not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]
