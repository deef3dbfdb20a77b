"""Where Model Runner V2 runs without a GPU: under Triton's interpreter."""

import importlib.util
import os

import pytest

from tests.models import ROOT

needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Model Runner V2 needs triton; pip install triton==3.9.0 (its interpreter is used)",
)


def v2_environment() -> dict[str, str]:
    """Of a process whose engines are on Model Runner V2, on the CPU."""
    support = [str(ROOT / "tests" / "v2" / "support"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, support)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
