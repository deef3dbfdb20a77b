"""Servers by name: stock vLLM, TriForce, and other checkouts of it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import vllm_triforce
from vllm_triforce_bench.bench import BadInput, methods
from vllm_triforce_bench.bench.model_facts import ModelFacts, kv_cache_bytes
from vllm_triforce_bench.bench.serve.settings import CONTROL, STOCK, TRIFORCE, ServeSettings
from vllm_triforce_bench.preload import libraries

MODEL = "model"
"""Name of the model in all servers."""
_PLUGIN = "triforce"
_PLUGIN_GROUPS = (
    *("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins"),
    *("vllm.stat_logger_plugins", "vllm.endpoint_plugins"),
)


@dataclass(frozen=True)
class Contender:
    """A kind of server.

    Args:
        speculative_config: None for stock vLLM, without this package's plugin.
        package_folder: folder that ``vllm_triforce`` is loaded from.
    """

    name: str
    label: str
    speculative_config: dict[str, Any] | None
    package_folder: str | None

    @property
    def is_stock(self) -> bool:
        return self.speculative_config is None

    def environment(self) -> dict[str, str]:
        environment = {
            # vLLM pins the workers of both servers to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # vLLM's default is the client's: a request may then meet a closing connection.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
            **os.environ,
            # The benchmark's own setting is for engines in its process.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # Without it the current folder comes before PYTHONPATH.
            "PYTHONSAFEPATH": "1",
        }
        # vLLM's preloading misses this OpenMP if torch brings another; both servers get it.
        preload = [*libraries(), os.environ.get("LD_PRELOAD", "")]
        environment["LD_PRELOAD"] = ":".join(path for path in preload if path)
        if self.is_stock:
            return environment | {"VLLM_PLUGINS": ",".join(_other_plugins())}
        paths = [self.package_folder, os.environ.get("PYTHONPATH")]
        return environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    def command(self, settings: ServeSettings, target: ModelFacts, port: int) -> list[str]:
        """Make the command line; servers differ in ``--speculative-config`` alone."""
        num_reqs = min(settings.max_num_seqs, max(cell.concurrency for cell in settings.cells))
        arguments = {
            "host": "127.0.0.1",
            "port": port,
            "served_model_name": MODEL,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "gpu_memory_utilization": 0.1,  # the KV cache's size is given
            "kv_cache_memory_bytes": kv_cache_bytes(settings, num_reqs, settings.dtype, target),
            "uvicorn_log_level": "warning",
            **settings.engine_keys,
        }
        if self.speculative_config is not None:
            arguments["speculative_config"] = self.speculative_config
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", settings.target]
        return command + flags(arguments)


def flags(arguments: dict[str, Any]) -> list[str]:
    """Format engine arguments for vLLM's command line."""
    words: list[str] = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def make(settings: ServeSettings) -> dict[str, Contender]:
    """Make the servers of the contests, by name.

    Raises:
        BadInput: TriForce refuses its keys, or a checkout cannot be loaded.
    """
    (variant,) = methods.variants(
        [TRIFORCE],
        [settings.budget],
        settings.target,
        settings.draft,
        {TRIFORCE: settings.triforce_keys},
    )
    here = str(Path(vllm_triforce.__file__).resolve().parents[1])
    contenders = {
        STOCK: Contender(STOCK, "stock vLLM", None, None),
        CONTROL: Contender(CONTROL, "stock vLLM again", None, None),
        TRIFORCE: Contender(TRIFORCE, "TriForce", variant.keys, here),
    }
    for name, folder in settings.others.items():
        contenders[name] = Contender(name, f"TriForce of {name}", variant.keys, folder)
    names = {
        name for contest in settings.contests for name in (contest.challenger, contest.baseline)
    }
    for name in names:
        _check_package(contenders[name])
    return {name: each for name, each in contenders.items() if name in names}


def checkouts(contenders: dict[str, Contender]) -> dict[str, str]:
    """Return the commit of each TriForce, as far as git knows."""
    return {
        contender.name: _commit(contender.package_folder)
        for contender in contenders.values()
        if contender.package_folder is not None
    }


def _commit(folder: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _check_package(contender: Contender) -> None:
    """Raise BadInput if the server would load the package from another folder."""
    if contender.package_folder is None:
        return
    done = subprocess.run(
        [sys.executable, "-c", "import vllm_triforce; print(vllm_triforce.__file__)"],
        env=contender.environment(),
        capture_output=True,
        text=True,
    )
    file = done.stdout.strip()
    if not file or Path(file).resolve().parents[1] != Path(contender.package_folder):
        raise BadInput(
            f"server {contender.name!r}: vllm_triforce is loaded from {file or done.stderr!r}, "
            f"not from {contender.package_folder}; name the root of a checkout, and let nothing "
            "come before PYTHONPATH"
        )


def _other_plugins() -> list[str]:
    """Names of vLLM's installed plugins, without this package's."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = {entry.name for group in _PLUGIN_GROUPS for entry in entry_points(group=group)}
    names -= {_PLUGIN}
    return sorted(names if allowed is None else names & set(allowed.split(",")))
