"""Preload the libraries that vLLM preloads for its workers: here the workers are this process."""

import importlib.util
import os
import sys
from pathlib import Path

_IS_RESTARTED = "VLLM_TRIFORCE_PRELOADED"


def libraries() -> list[str]:
    """List Intel's OpenMP and tcmalloc, if they are installed and not preloaded.

    vLLM's CPU build speculates slowly without this OpenMP. A GPU build has neither.
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    paths = []
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if "omp" not in preloaded and openmp.exists():
        paths.append(str(openmp))
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or []:
        for library in sorted(Path(folder, "libs").glob("libtcmalloc*.so*"))[:1]:
            if "libtcmalloc" not in preloaded:
                paths.append(str(library))
    return paths


def restart_if_needed(argv: list[str]) -> None:
    """Replace this process by ``vllm-triforce ARGV`` with the libraries preloaded, once."""
    paths = libraries()
    if not paths or os.environ.get(_IS_RESTARTED) or not sys.platform.startswith("linux"):
        return
    preload = ":".join([*paths, os.environ.get("LD_PRELOAD", "")]).strip(":")
    environment = {**os.environ, "LD_PRELOAD": preload, _IS_RESTARTED: "1"}
    command = [sys.executable, "-m", "vllm_triforce.cli", *argv]
    os.execve(sys.executable, command, environment)
