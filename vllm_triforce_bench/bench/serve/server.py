"""Start, watch and end a ``vllm serve`` on loopback."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_triforce_bench.metrics import read_metrics

_START_LIMIT_S = 1800
_TAIL_CHARACTERS = 3000
# A server is at rest below this share of a core over this time. One that never is at rest is waited
# for up to the limit.
_RESTING_SHARE, _RESTING_S, _REST_LIMIT_S = 0.1, 0.3, 10.0
_PR_SET_PDEATHSIG = 1
_COUNTS = {
    "steps": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
}


class ServerFailed(RuntimeError):
    """A server ended, or an answer is wrong."""


@dataclass
class Server:
    """A server that answers; ``runs`` counts the measured runs since its start."""

    name: str
    process: subprocess.Popen
    port: int
    log: Path
    runs: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerFailed(f"server {self.name!r} ended with code {code}.\n{self.tail()}")

    def tail(self) -> str:
        text = self.log.read_text(errors="replace")
        return f"The end of {self.log}:\n{text[-_TAIL_CHARACTERS:]}"

    def cpu_seconds(self) -> float:
        """CPU time of the server's processes."""
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            for process in [first, *first.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def engine_counts(self) -> dict[str, int]:
        """Count the engine's steps and preemptions since its start."""
        samples = read_metrics(self.address, timeout_s=60)
        return {
            name: int(sum(sample.value for sample in samples if sample.name == metric))
            for name, metric in _COUNTS.items()
        }


def wait_until_at_rest(servers: Iterable[Server]) -> None:
    """Wait until no server works: OpenMP's threads spin for a while after the last step."""
    deadline = time.monotonic() + _REST_LIMIT_S
    servers = list(servers)
    while time.monotonic() < deadline:
        before = sum(server.cpu_seconds() for server in servers)
        time.sleep(_RESTING_S)
        if sum(server.cpu_seconds() for server in servers) - before < _RESTING_SHARE * _RESTING_S:
            return


@contextmanager
def running(
    name: str, make_command: Callable[[int], list[str]], environment: dict[str, str], log: Path
) -> Iterator[Server]:
    """Run a server until the block ends.

    Args:
        make_command: makes the command line from the port.
        log: file that the output is appended to.

    Raises:
        ServerFailed: the server does not start.
    """
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        process = subprocess.Popen(
            make_command(port),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform.startswith("linux") else None,
        )
    server = Server(name, process, port, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _stop(process)


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        server.check()
        try:
            with urllib.request.urlopen(f"{server.address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise ServerFailed(
        f"server {server.name!r} does not answer after {_START_LIMIT_S} s.\n{server.tail()}"
    )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _end_with_parent() -> None:
    """End the server with a benchmark that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    # The engine is another process of the group.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
