"""Promise: `vllm serve` with TriForce answers as stock vLLM does; the real multi-process path."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.generation import assert_same_tokens, generate
from tests.models import held_out_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    keys = {"model": pair["draft"], "min_context": 0, "retrieval_budget": 256}
    keys |= {"log_interval": 1}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", pair["target"]),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "4096", "--max-num-seqs", "4", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.1", "--served-model-name", "target"),
        *("--speculative-model", "triforce", "--speculative-config", json.dumps(keys)),
    ]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(address, process, log)
        yield address, log
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_healthy(address, process, log, seconds=240) -> None:
    for _ in range(seconds):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


def complete(address: str, prompts: list[list[int]], **params) -> list[list[int]]:
    body = {"model": "target", "prompt": prompts, "return_token_ids": True, **params}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        choices = json.load(response)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])]


def test_server_answers_as_stock(server, engines, pair):
    address, log = server
    stock = engines.get(pair["target"])
    text = held_out_tokens(stock.get_tokenizer(), 3000)
    prompts = [text[:60], text[:700], text[100:2900]]
    found = complete(address, prompts, max_tokens=40, temperature=0, ignore_eos=True)
    wanted = generate(stock, prompts, max_tokens=40)
    for prompt, w, f in zip(prompts, wanted, found):
        assert_same_tokens(stock, prompt, w, f)
    time.sleep(1.1)
    complete(address, prompts[:1], max_tokens=8, temperature=0)
    assert "TriForce metrics: Mean acceptance length" in log.read_text()


def test_server_samples(server):
    address, _ = server
    params = dict(max_tokens=12, temperature=0.8, top_p=0.9, seed=3)
    prompt = [[5, 6, 7, 8] * 40]
    assert complete(address, prompt, **params) == complete(address, prompt, **params)
