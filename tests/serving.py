"""A real ``vllm serve`` on loopback, and what can be read from it."""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from vllm.utils.network_utils import get_open_port

from vllm_triforce_bench.bench import server as of_bench
from vllm_triforce_bench.bench.methods import CONTROL_VARIANT

MODEL = "target"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] or "
    "'<|vision_start|><|' ~ part['type'] ~ '_pad|><|vision_end|>' }}{% endfor %}\n{% endfor %}"
)


class Server(of_bench.Server):
    def metrics(self) -> dict[str, float]:
        """Return samples by name, added up over labels, and by ``name{labels}``."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                bare = name.split("{")[0]
                found[name] = float(value)
                if bare != name:
                    found[bare] = found.get(bare, 0.0) + float(value)
        return found

    def rpc(self, method: str):
        """Return the first worker's answer (vLLM's development endpoint)."""
        return self.post("/collective_rpc", {"method": method})["results"][0]

    def post(self, path: str, body: dict, timeout: float = 120) -> dict:
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def processes(self) -> dict[str, psutil.Process]:
        """Return API server, engine core and worker, by the names that vLLM gives them."""
        found = {"api_server": psutil.Process(self.process.pid)}
        for child in found["api_server"].children(recursive=True):
            if match := re.match(r"VLLM::(\w+)", child.name()):
                found[match[1]] = child
        return found

    def text(self) -> str:
        return self.log.read_text()


def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


@contextmanager
def serve(model: str, log: Path, *arguments: str, **env: str) -> Iterator[Server]:
    """Run a server until the block ends."""
    port = get_open_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--served-model-name", MODEL, "--chat-template", CHAT_TEMPLATE),
        *("--gpu-memory-utilization", "0.1", *arguments),
    ]
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM pins every worker of a machine to the same cores, whatever else runs there.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TRIFORCE_CHECK": "raise",
        "HF_HUB_OFFLINE": "1",
        # By default as long as the client's own: a request may then meet a connection that closes.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        **env,
    }
    process = of_bench.start(command, env, log)
    server = Server(CONTROL_VARIANT, process, port, log)
    try:
        of_bench.wait_until_healthy(server)
        yield server
    finally:
        of_bench.stop(process)
