"""Asks a real Prometheus all that the dashboard asks, over a real server under some traffic.

    python -m tests.examples.ask_prometheus      # needs `prometheus` (Debian's package); a minute

Ends with 1 if a query is not answered, or has no figure where its feature is in use.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from tests.examples.monitoring import FOLDER, queries
from tests.models import PAIR, ROOT
from tests.serving import serve

_PORT = 19090
# Not in use on a CPU.
_WITHOUT_FIGURES = ("Read from host memory", "Of what level 2 reads, on the device already")


def main() -> int:
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is not installed: apt-get install prometheus")
    keys = {"method": "triforce", "model": str(PAIR / "draft"), "retrieval_budget": 512}
    keys |= {"min_context": 0, "adaptive": False}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        options = ("--max-model-len", "12000", "--speculative-config", json.dumps(keys))
        with serve(str(PAIR / "target"), log, *options) as server:
            prometheus = _start(Path(folder), server.address)
            try:
                _traffic(server.address)
                return _ask()
            finally:
                prometheus.terminate()
                prometheus.wait()


def _start(folder: Path, address: str) -> subprocess.Popen:
    config = (FOLDER / "prometheus.yml").read_text()
    config = config.replace("vllm:8000", address.removeprefix("http://"))
    config = re.sub(r"scrape_interval: \w+", "scrape_interval: 1s", config)
    (folder / "prometheus.yml").write_text(config)
    return subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{_PORT}",
            "--log.level=error",
        ]
    )


def _traffic(address: str) -> None:
    command = [sys.executable, ROOT / "examples" / "long_document_chat.py"]
    command += ["--base-url", f"{address}/v1", "--characters", "20000", "--max-tokens", "96"]
    for _ in range(3):
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
        )
        time.sleep(3)


def _ask() -> int:
    bad = 0
    for title, query in queries():
        address = f"http://127.0.0.1:{_PORT}/api/v1/query?" + urllib.parse.urlencode(
            {"query": query}
        )
        try:
            with urllib.request.urlopen(address, timeout=30) as response:
                result = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            result, bad = [], bad + 1
        else:
            values = [float(each["value"][1]) for each in result]
            has_figures = bool(values) and all(value == value for value in values)
            bad += not has_figures and title not in _WITHOUT_FIGURES
            said = ", ".join(f"{value:.3g}" for value in values) or "nothing"
        print(f"{title}: {said}\n    {query}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
