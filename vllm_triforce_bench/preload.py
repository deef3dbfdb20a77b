"""vLLM preloads libraries for its worker processes; here the workers are this process."""

import importlib.util
import os
import sys
from pathlib import Path

_AGAIN = "VLLM_TRIFORCE_PRELOADED"


def libraries() -> list[str]:
    """Intel's OpenMP, without which vLLM's CPU build speculates slowly, and tcmalloc, as far as
    they are installed and not preloaded yet. None beside a GPU build."""
    present = os.environ.get("LD_PRELOAD", "")
    found = []
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if "omp" not in present and openmp.exists():
        found.append(str(openmp))
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or []:
        for library in sorted(Path(folder, "libs").glob("libtcmalloc*.so*"))[:1]:
            if "libtcmalloc" not in present:
                found.append(str(library))
    return found


def restart_if_needed(argv: list[str]) -> None:
    """Replaces this process by the command with the libraries preloaded, once.

    Args:
        argv: of ``vllm-triforce``.
    """
    found = libraries()
    if not found or os.environ.get(_AGAIN) or not sys.platform.startswith("linux"):
        return
    preload = ":".join([*found, os.environ.get("LD_PRELOAD", "")]).strip(":")
    environment = {**os.environ, "LD_PRELOAD": preload, _AGAIN: "1"}
    command = [sys.executable, "-m", "vllm_triforce.cli", *argv]
    os.execve(sys.executable, command, environment)
