"""The two shared libraries of NVIDIA's driver, replaced by the stubs that setup.sh compiles."""

import ctypes
import os
import sys


def load_stub_libraries() -> None:
    """Loads them by path first: later requests for the same soname get these."""
    folder = os.path.join(sys.prefix, "..", "stubs")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{path} is missing: run setup.sh, and use the Python of its venv"
            )
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
