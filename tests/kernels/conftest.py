"""Collect these tests on a GPU, or in Triton's interpreter (tests/unit/test_kernels.py)."""

from tests.kernels.device import DEVICE, INTERPRETED

if INTERPRETED:  # vLLM's tensors that host and device share, as its CPU worker has them
    import vllm.v1.worker.cpu.shm  # noqa: F401
elif DEVICE.type == "cpu":
    collect_ignore_glob = ["test_*.py"]
