"""Load of one run: ``vllm bench serve``, in this process."""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from vllm_triforce_bench.bench.serve.cells import Cell
from vllm_triforce_bench.bench.serve.contenders import MODEL
from vllm_triforce_bench.bench.serve.server import Server, ServerFailed
from vllm_triforce_bench.bench.serve.settings import ServeSettings

PERCENTILES = (90, 99)


def run(
    server: Server,
    others: Sequence[Server],
    cell: Cell,
    prompts: Sequence[list[int]],
    settings: ServeSettings,
    folder: Path,
) -> dict[str, Any]:
    """Send the requests and return the figures of ``vllm bench serve``, without those of each.

    Args:
        others: further servers that must not end meanwhile.
        prompts: token ids.
        folder: folder of the file of prompts and of the log.

    Raises:
        ServerFailed: a server ended, a request failed, or the limit is over.
    """
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    arguments = bench_arguments(
        server.port, cell, path, len(prompts), settings.top_p, settings.seed
    )
    with (folder / "bench.log").open("a") as log:
        print(f"--- {server.name}: {cell.describe()}", file=log)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            result = asyncio.run(_watched(arguments, [server, *others], settings.run_limit))
    expected = len(prompts) * cell.output_len
    if result["completed"] < len(prompts) or result["total_output_tokens"] != expected:
        raise ServerFailed(
            f"server {server.name!r} completed {result['completed']} of {len(prompts)} requests "
            f"with {result['total_output_tokens']} of {expected} tokens at {cell.describe()}; see "
            f"{folder / 'bench.log'}.\n{server.tail()}"
        )
    figures = {name: value for name, value in result.items() if _is_figure(name, value)}
    return figures | latencies(result)


def latencies(result: dict[str, Any]) -> dict[str, float]:
    """Compute times to the first token and between later ones as vLLM does with a tokenizer."""
    first = [1e3 * seconds for seconds in result["ttfts"]]
    later = [
        (1e3 * whole - begun) / (tokens - 1)
        for begun, whole, tokens in zip(first, result["latencies"], result["output_lens"])
    ]
    figures = {}
    for name, values in (("ttft", first), ("tpot", later)):
        figures[f"mean_{name}_ms"] = float(numpy.mean(values))
        figures[f"median_{name}_ms"] = float(numpy.median(values))
        for percentile in PERCENTILES:
            figures[f"p{percentile}_{name}_ms"] = float(numpy.percentile(values, percentile))
    return figures


def bench_arguments(
    port: int, cell: Cell, prompts: Path, num_prompts: int, top_p: float, seed: int
) -> list[str]:
    """Make the arguments of ``vllm bench serve``.

    Prompts are sent as token ids, exactly as long as wanted. The client then has no tokenizer, and
    without one it does not send the length of the output; the body does.
    """
    body: dict[str, Any] = {"max_tokens": cell.output_len, "temperature": cell.temperature}
    if cell.temperature:
        body["top_p"] = top_p
    return [
        *("--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
        *("--endpoint", "/v1/completions", "--model", MODEL, "--served-model-name", MODEL),
        *("--skip-tokenizer-init", "--dataset-name", "custom", "--dataset-path", str(prompts)),
        *("--disable-shuffle", "--num-prompts", str(num_prompts), "--seed", str(seed)),
        *("--max-concurrency", str(cell.concurrency)),
        *("--request-rate", "inf" if cell.request_rate is None else str(cell.request_rate)),
        *("--temperature", str(cell.temperature), "--extra-body", json.dumps(body)),
        *("--ignore-eos", "--disable-tqdm", "--save-detailed", "--percentile-metrics", "e2el"),
        *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
    ]


async def _watched(arguments: list[str], servers: Sequence[Server], limit_s: int) -> dict:
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    task = asyncio.create_task(main_async(parser.parse_args(arguments)))
    deadline = time.monotonic() + limit_s
    while True:
        done, _ = await asyncio.wait({task}, timeout=1)
        if done:
            return task.result()
        try:
            for server in servers:
                server.check()
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"server {servers[0].name!r} took longer than {limit_s} s; raise --run-limit "
                    f"or lower --requests-per-run.\n{servers[0].tail()}"
                )
        except ServerFailed:
            task.cancel()
            raise


def _is_figure(name: str, value: Any) -> bool:
    """True unless the value is a list with an entry for each request."""
    return not isinstance(value, list | dict) or name.startswith("spec_decode")
