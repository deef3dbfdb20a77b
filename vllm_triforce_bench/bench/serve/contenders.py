"""The servers that can be compared: what each is started with."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import vllm_triforce
from vllm_triforce_bench.bench import methods
from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.model_facts import ModelFacts, kv_bytes_of
from vllm_triforce_bench.bench.serve.settings import CONTROL, STOCK, TRIFORCE, ServeSettings
from vllm_triforce_bench.preload import libraries

MODEL = "model"
"""The name that the servers give it."""
_PLUGIN = "triforce"
_PLUGIN_GROUPS = (
    *("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins"),
    *("vllm.stat_logger_plugins", "vllm.endpoint_plugins"),
)


@dataclass(frozen=True)
class Contender:
    """A kind of server."""

    name: str
    label: str
    speculative_config: dict[str, Any] | None
    """None: stock vLLM, without this package's plugin."""
    package_folder: str | None
    """Where ``vllm_triforce`` is loaded from."""

    @property
    def is_stock(self) -> bool:
        return self.speculative_config is None

    def environment(self) -> dict[str, str]:
        defaults = {
            # vLLM pins every worker of a machine to the same cores, whatever else runs there.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # By default as long as the client's own: a request may then meet a closing connection.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
            **os.environ,
            # The benchmark's own process; a server is one of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # Without it the folder that the command was given in comes before PYTHONPATH.
            "PYTHONSAFEPATH": "1",
        }
        # vLLM's own preloading misses OpenMP where torch brings another; both servers get it.
        preload = [*libraries(), os.environ.get("LD_PRELOAD", "")]
        defaults["LD_PRELOAD"] = ":".join(path for path in preload if path)
        if self.is_stock:
            return defaults | {"VLLM_PLUGINS": ",".join(_other_plugins())}
        paths = [self.package_folder, os.environ.get("PYTHONPATH")]
        return defaults | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    def command(self, settings: ServeSettings, target: ModelFacts, port: int) -> list[str]:
        """Servers differ in ``--speculative-config`` alone."""
        requests = min(settings.max_num_seqs, max(cell.concurrency for cell in settings.cells))
        kv_bytes = kv_bytes_of(requests, settings.max_model_len, settings.dtype, target)
        if settings.kv_cache_gib is not None:
            kv_bytes = int(settings.kv_cache_gib * (1 << 30))
        arguments = {
            "host": "127.0.0.1",
            "port": port,
            "served_model_name": MODEL,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "gpu_memory_utilization": 0.1,  # the KV cache's size is given
            "kv_cache_memory_bytes": kv_bytes,
            "uvicorn_log_level": "warning",
            **settings.engine_keys,
        }
        if self.speculative_config is not None:
            arguments["speculative_config"] = self.speculative_config
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", settings.target]
        return command + flags(arguments)


def flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line takes them."""
    found = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(option if value else "--no-" + option[2:])
        elif isinstance(value, list):
            found += [option, *map(str, value)]
        else:
            found += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def make(settings: ServeSettings) -> dict[str, Contender]:
    """Those of the contests, by name.

    Raises:
        BadInput: TriForce refuses its keys, or another checkout cannot be loaded.
    """
    (variant,) = methods.variants(
        [TRIFORCE], [settings.budget], settings.draft, {TRIFORCE: settings.triforce_keys}
    )
    here = str(Path(vllm_triforce.__file__).resolve().parents[1])
    known = {
        STOCK: Contender(STOCK, "stock vLLM", None, None),
        CONTROL: Contender(CONTROL, "stock vLLM again", None, None),
        TRIFORCE: Contender(TRIFORCE, "TriForce", variant.keys, here),
    }
    for name, folder in settings.others.items():
        known[name] = Contender(name, f"TriForce of {name}", variant.keys, folder)
    names = {
        name for contest in settings.contests for name in (contest.challenger, contest.baseline)
    }
    for name in names:
        _check_package(known[name])
    return {name: contender for name, contender in known.items() if name in names}


def checkouts(contenders: dict[str, Contender]) -> dict[str, str]:
    """The commit that each TriForce was loaded from, as far as git knows."""
    found = {}
    for contender in contenders.values():
        if contender.package_folder is not None:
            found[contender.name] = _commit(contender.package_folder)
    return found


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
    """Raises BadInput: its server would load the package from somewhere else."""
    if contender.package_folder is None:
        return
    done = subprocess.run(
        [sys.executable, "-c", "import vllm_triforce; print(vllm_triforce.__file__)"],
        env=contender.environment(),
        capture_output=True,
        text=True,
    )
    found = done.stdout.strip()
    if not found or Path(found).resolve().parents[1] != Path(contender.package_folder):
        raise BadInput(
            f"server {contender.name!r}: vllm_triforce is loaded from {found or done.stderr!r}, "
            f"not from {contender.package_folder}; name the root of a checkout, and let nothing "
            "come before PYTHONPATH"
        )


def _other_plugins() -> list[str]:
    """Names of all of vLLM's plugins that are installed, but this package's."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = {entry.name for group in _PLUGIN_GROUPS for entry in entry_points(group=group)}
    names -= {_PLUGIN}
    return sorted(names if allowed is None else names & set(allowed.split(",")))
