"""Load of one run: the client of ``vllm bench serve``, in this process."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark

from vllm_triforce_bench.bench.grid import PairedSet
from vllm_triforce_bench.bench.serve.server import MODEL, Server
from vllm_triforce_bench.bench.settings import Settings


def run(
    server: Server,
    others: Sequence[Server],
    paired: PairedSet,
    prompts: Sequence[list[int]],
    settings: Settings,
    log: Path,
) -> dict[str, Any]:
    """Send the requests and return the figures of ``vllm bench serve``, without those of each.

    Args:
        others: further servers that must not end meanwhile.
        prompts: token ids.
        log: file that the client's output is appended to.

    Raises:
        ServerFailed: a server ended, or a request failed.
    """
    # Times of arrival.
    random.seed(settings.seed + paired.repetition)
    numpy.random.seed((settings.seed + paired.repetition) % (1 << 32))
    load = benchmark(**client_arguments(server.address, paired, prompts, settings))
    with log.open("a") as out:
        print(f"--- {server.variant.label}: {paired}", file=out)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            result = asyncio.run(_watched(load, [server, *others]))
    expected = len(prompts) * settings.tokens
    if result["completed"] < len(prompts) or result["total_output_tokens"] != expected:
        raise server.failed(
            f"completed {result['completed']} of {len(prompts)} requests with "
            f"{result['total_output_tokens']} of {expected} tokens; see {log}"
        )
    # Lists have an entry for each request, but those of speculation.
    return {
        name: value
        for name, value in result.items()
        if not isinstance(value, list) or name.startswith("spec_decode")
    }


def client_arguments(
    address: str, paired: PairedSet, prompts: Sequence[list[int]], settings: Settings
) -> dict[str, Any]:
    """Make the arguments of vLLM's client, which sends token ids past any end of sequence."""
    body = {"temperature": paired.temperature}
    if paired.temperature:
        body["top_p"] = settings.top_p
    return {
        "task_type": TaskType.GENERATION,
        "endpoint_type": "openai",
        "api_url": f"{address}/v1/completions",
        "base_url": address,
        "model_id": MODEL,
        "model_name": MODEL,
        # The server counts tokens; without a tokenizer the client leaves out times of tokens.
        "tokenizer": MODEL,
        "input_requests": [SampleRequest(ids, len(ids), settings.tokens) for ids in prompts],
        "logprobs": None,
        "request_rate": settings.request_rate or float("inf"),
        "burstiness": 1.0,
        "disable_tqdm": True,
        "num_warmups": 0,
        "profile": False,
        "selected_percentile_metrics": ["ttft", "tpot", "e2el"],
        "selected_percentiles": [90, 99],
        "ignore_eos": True,
        "goodput_config_dict": {},
        "max_concurrency": paired.batch_size,
        "lora_modules": None,
        "extra_headers": None,
        "extra_body": body,
        "ready_check_timeout_sec": 0,
    }


async def _watched(load, servers: Sequence[Server]) -> dict[str, Any]:
    """Await the load; raise ServerFailed as soon as a server has ended."""
    task = asyncio.create_task(load)
    try:
        while not (await asyncio.wait({task}, timeout=1))[0]:
            for server in servers:
                server.check()
        return task.result()
    finally:
        task.cancel()
