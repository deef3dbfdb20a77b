"""Where the kernels run: on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

needs_triton = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED,
    reason="needs a GPU, or TRITON_INTERPRET=1 as tests/unit/test_kernels.py sets it",
)
