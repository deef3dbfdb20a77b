"""Start, watch and end a ``vllm serve`` on loopback."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import vllm_triforce
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.metrics import read_metrics
from vllm_triforce_bench.preload import libraries

MODEL = "model"
"""Name of the model in all servers."""
_PLUGIN_GROUPS = (
    *("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins"),
    *("vllm.stat_logger_plugins", "vllm.endpoint_plugins"),
)
_START_LIMIT_S = 1800
_TAIL_CHARACTERS = 3000
_PR_SET_PDEATHSIG = 1
_COUNTS = {
    "steps": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
}


class ServerFailed(RuntimeError):
    """A server ended, or an answer is wrong."""


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    variant: Variant
    process: subprocess.Popen
    port: int
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def failed(self, reason: str) -> ServerFailed:
        tail = self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        return ServerFailed(
            f"server {self.variant.label!r} {reason}.\nThe end of {self.log}:\n{tail}"
        )

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise self.failed(f"ended with code {code}")

    def engine_counts(self) -> dict[str, int]:
        """Count the engine's steps and preemptions since its start."""
        samples = read_metrics(self.address, timeout_s=60)
        return {
            name: int(sum(sample.value for sample in samples if sample.name == metric))
            for name, metric in _COUNTS.items()
        }


@contextmanager
def running(variant: Variant, model: str, arguments: dict[str, Any], log: Path) -> Iterator[Server]:
    """Run a server until the block ends.

    Raises:
        ServerFailed: the server does not start.
    """
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    process = start(command(variant, model, port, arguments), environment(variant), log)
    server = Server(variant, process, port, log)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        stop(process)


def start(words: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a process that ends with this one, in a group of its own."""

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        return subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform.startswith("linux") else None,
        )


def command(variant: Variant, model: str, port: int, arguments: dict[str, Any]) -> list[str]:
    """Make the command line; the servers of a set differ in ``--speculative-config`` alone."""
    of_server = {"host": "127.0.0.1", "port": port, "served_model_name": MODEL}
    of_server |= {"uvicorn_log_level": "warning", "speculative_config": variant.keys}
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    return words + flags(arguments | of_server)


def flags(arguments: dict[str, Any]) -> list[str]:
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


def environment(variant: Variant) -> dict[str, str]:
    """Make a server's environment: stock vLLM's methods run without this package's plugin."""
    # vLLM's preloading misses this OpenMP if torch brings another; both servers get it.
    preload = [*libraries(), os.environ.get("LD_PRELOAD", "")]
    paths = [str(Path(vllm_triforce.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    overrides = {
        # The benchmark's own setting is for engines in its process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # Without it the current folder comes before PYTHONPATH.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LD_PRELOAD": ":".join(path for path in preload if path),
    }
    if not variant.is_triforce:
        allowed = os.environ.get("VLLM_PLUGINS")
        plugins = {entry.name for group in _PLUGIN_GROUPS for entry in entry_points(group=group)}
        plugins -= {"triforce"}
        if allowed is not None:
            plugins &= set(allowed.split(","))
        overrides["VLLM_PLUGINS"] = ",".join(sorted(plugins))
    return {
        # vLLM pins the workers of both servers to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM's default is the client's: a request may then meet a closing connection.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        **os.environ,
        **overrides,
    }


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        server.check()
        with suppress(OSError), urllib.request.urlopen(f"{server.address}/health", timeout=5):
            return
        time.sleep(0.5)
    raise server.failed(f"does not answer after {_START_LIMIT_S} s")


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    # The engine is another process of the group.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
