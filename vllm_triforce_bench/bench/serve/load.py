"""The load of one run: vLLM's own ``vllm bench serve``, in this process."""

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

PERCENTILES = (90, 99)


def run(
    server: Server,
    others: Sequence[Server],
    cell: Cell,
    prompts: Sequence[list[int]],
    *,
    top_p: float,
    seed: int,
    limit_s: int,
    folder: Path,
) -> dict[str, Any]:
    """What ``vllm bench serve`` says of these requests, without what it says of each.

    Args:
        others: servers that must not end meanwhile either.
        prompts: token ids.
        folder: for the file of prompts, and the log.

    Raises:
        ServerFailed: a server ended, a request failed, or it took too long.
    """
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    arguments = bench_arguments(server.port, cell, path, len(prompts), top_p, seed)
    with (folder / "bench.log").open("a") as log:
        print(f"--- {server.name}: {cell.describe()}", file=log)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            found = asyncio.run(_watched(arguments, [server, *others], limit_s))
    expected = len(prompts) * cell.output_len
    if found["completed"] < len(prompts) or found["total_output_tokens"] != expected:
        raise ServerFailed(
            f"server {server.name!r} completed {found['completed']} of {len(prompts)} requests "
            f"with {found['total_output_tokens']} of {expected} tokens at {cell.describe()}; see "
            f"{folder / 'bench.log'}.\n{server.tail()}"
        )
    kept = {name: value for name, value in found.items() if _is_a_figure(name, value)}
    return kept | latencies(found)


def latencies(found: dict[str, Any]) -> dict[str, float]:
    """Times to the first token and between later ones, as vLLM computes them of each request.

    It leaves them out where it has no tokenizer.
    """
    first = [1e3 * seconds for seconds in found["ttfts"]]
    later = [
        (1e3 * whole - begun) / (tokens - 1)
        for begun, whole, tokens in zip(first, found["latencies"], found["output_lens"])
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
    """As ``vllm bench serve`` takes them.

    Prompts go as token ids, so that their length is the one asked for: the client then needs no
    tokenizer, and without one it does not know the length of the output; the body says it.
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


def _is_a_figure(name: str, value: Any) -> bool:
    """Not a list with a place for each request."""
    return not isinstance(value, list | dict) or name.startswith("spec_decode")
