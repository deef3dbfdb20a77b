"""What a reader must know to compare figures: versions, machine, date, command line."""

import datetime
import os
import platform
import shlex
from importlib import metadata
from pathlib import Path


def machine() -> dict[str, str]:
    """What measurements must have in common to be compared."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    import vllm_triforce

    return {
        "vllm-triforce": vllm_triforce.__version__,
        "vLLM": vllm.__version__,
        "device": _cpu_name() if current_platform.is_cpu() else torch.cuda.get_device_name(),
        "cores": f"{len(os.sched_getaffinity(0))}",
    }


def describe(argv: list[str]) -> dict[str, str]:
    """In the order in which it is shown.

    Args:
        argv: of ``vllm-triforce``.
    """
    import torch

    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC"),
        **machine(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "Python": platform.python_version(),
        "threads of torch": f"{torch.get_num_threads()}",
        "load when it ended": f"{os.getloadavg()[0]:.2f}",
        "preloaded": " ".join(Path(path).name for path in preloaded if path) or "nothing",
        "command": shlex.join(["vllm-triforce", *argv]),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
