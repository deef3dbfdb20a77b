"""Soak: random requests in bursts through a server whose cache is too small for them.

    python -m tests.soak --requests 1000          # 10 to 25 minutes on 2 cores; --help for more
    python -m tests.soak --minutes 120 --keys '{}' --bench
    python -m tests.soak --minutes 120 --keys '{}' --bench --model smollm2

``--bench`` runs vLLM's own client, ``vllm bench serve``, again and again at the same time.

The requests are the fuzzer's streams, a tenth of them left by the client while they stream; the
controller chooses. Checked, as the fuzzer does: every greedy answer is stock vLLM's (float32; as
far as it came), and every request is answered as it asked for, with as many tokens as vLLM counts.
And all blocks and private caches are free at the end, memory is flat, and nothing is found wrong
where proposals are handed up.

``seed`` on sampled requests is a run of its own (``--seeds``), prompts read whole: stock vLLM's
CPU build ends the engine on a seeded prompt that is read in chunks (patches/README.md).
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import openai

from tests.fuzz.drive import Answer, Choice
from tests.fuzz.judge import badly_answered
from tests.fuzz.models import draft_of, target_of, tokens_of
from tests.fuzz.stock import Stock
from tests.fuzz.streams import drawn, streams
from tests.models import PAIR
from tests.serving import MODEL, Server, change, serve

MAX_OUTSTANDING = {"pair": 48, "smollm2": 6}
# 140 blocks of 32 tokens: 4,480, where one request may want 4,352 and sixteen run together.
SERVER = [
    *("--max-model-len", "4352", "--max-num-seqs", "16", "--num-gpu-blocks-override", "140"),
    *("--max-num-batched-tokens", "2048", "--distributed-executor-backend", "mp"),
    *("--block-size", "32", "--scheduling-policy", "priority"),
    "--enable-per-request-metrics",
]
TRIFORCE = [
    *("--per-request-spec-decode-metrics", "detailed"),
    *("--speculative-model", "triforce", "--speculative-config"),
]
# Two things of the host grow with the number of shapes seen, in stock vLLM too, and would hide a
# leak: oneDNN keeps up to 1,024 compiled matrix products (0.2 MiB each, one per weight shape and
# number of tokens), and glibc keeps freed buffers of many sizes in its heap, once one was freed.
FLAT_MEMORY = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
# Sixteen prompts of any length in one step.
WHOLE_PROMPTS = 16 * 4352
KEYS = {"model": str(PAIR / "draft"), "retrieval_budget": 256}
# Its prompts take long to read, and 46 KiB of KV cache a token.
SMOLLM2 = ["--max-model-len", "6400", "--num-gpu-blocks-override", "320", "--max-num-seqs", "8"]
MAX_MODEL_LEN = {"pair": 4352, "smollm2": 6400}
BENCH_PROMPTS = 12
GROWTH = "memory growth (MiB)"
# Tables, which HTTP has in another form, and what it does not take.
NOT_SERVED = ("logprobs", "prompt_logprobs", "bad_words_token_ids", "repetition")

Sent = list[tuple[dict, Answer]]
"""Requests and their answers."""


def settings_of(model: str, seeds: bool = False) -> dict:
    """The server as the fuzzer's settings say it.

    Args:
        seeds: whether sampled requests may have a seed.
    """
    engine = {
        "max_model_len": MAX_MODEL_LEN[model],
        "block_size": 32,
        "max_num_batched_tokens": WHOLE_PROMPTS if seeds else 2048,
        "scheduling_policy": "priority",
        "structured_outputs_config": {"backend": "auto"},
    }
    return {"model": model, "lora": False, "engine": engine, "triforce": {}}


def random_streams(
    settings: dict, seed: int, count: float = float("inf"), minutes: float = float("inf")
) -> Iterator[list[dict]]:
    """Draw streams until there are so many requests, or the time is over."""
    end = time.monotonic() + 60 * minutes
    # Sixteen that fit together when they come, and not for long before the first ends: preemption.
    growing = {"max_tokens": 320, "temperature": 0, "ignore_eos": True, "text": True}
    yield [
        {"prompt": {"kind": "text", "start": start, "length": 200}, "params": growing}
        for start in range(0, 160, 10)
    ]
    count -= 16
    for number in itertools.count():
        for stream in drawn(streams(settings), 25, (seed, number)):
            if time.monotonic() > end or count <= 0:
                return
            stream = stream[: int(min(count, len(stream)))]
            count -= len(stream)
            yield [_served(request) for request in stream]


def _served(request: dict) -> dict:
    kept = {name: request[name] for name in ("prompt", "abort", "priority") if name in request}
    params = {name: its for name, its in request["params"].items() if name not in NOT_SERVED}
    return kept | {"params": params | {"text": True}}


async def answer(client, model: str, request: dict) -> Answer:
    """Send a request with the openai client; one that is aborted streams and leaves."""
    body = {name: its for name, its in request["params"].items() if name != "text"}
    if structured := body.pop("structured", None):
        body["structured_outputs"] = structured
    body |= {"logit_bias": dict(body.get("logit_bias", ())), "priority": request.get("priority", 0)}
    body |= {"return_token_ids": True, "add_special_tokens": False}
    prompt = tokens_of(model, request["prompt"])
    given = Answer(is_aborted="abort" in request)
    if not given.is_aborted:
        found = await client.completions.create(model=MODEL, prompt=prompt, extra_body=body)
        _note(given, found)
        given.num_finished = 1
        num_tokens = sum(len(choice.token_ids) for choice in given.choices.values())
        assert num_tokens == found.usage.completion_tokens, request
        return given
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, stream=True, extra_body=body
    )
    for _ in range(request["abort"]):
        if (chunk := await anext(stream, None)) is None:
            break
        _note(given, chunk)
    await stream.close()
    return given


def _note(given: Answer, found) -> None:
    for its in found.choices:
        choice = given.choices.setdefault(its.index, Choice())
        choice.token_ids += its.token_ids or []
        choice.text, choice.stop_reason = choice.text + its.text, its.stop_reason
        choice.finish_reasons += [its.finish_reason] if its.finish_reason else []


async def send_all(address: str, model: str, wanted: Iterable[list[dict]], seed: int) -> Sent:
    """Send streams one after another, each at once; about MAX_OUTSTANDING[model] are under way."""
    draw, sent, pending = random.Random(seed + 1), [], set()
    # While others keep coming, a request of low priority may wait for all of them.
    client = openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", timeout=7200, max_retries=0
    )
    for stream in wanted:
        tasks = [asyncio.create_task(answer(client, model, request)) for request in stream]
        sent += zip(stream, tasks)
        pending.update(tasks)
        sys.stderr.write(f"{len(sent)} sent, {time.strftime('%X')}\n")
        await asyncio.sleep(draw.expovariate(1.0))
        while len(pending) > MAX_OUTSTANDING[model]:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a request that failed ends the soak
    answered = [(request, await task) for request, task in sent]
    await client.close()
    return answered


class MemoryWatch:
    """Resident memory of the server's processes, sampled as the soak goes."""

    def __init__(self, server: Server) -> None:
        self._processes = server.processes()
        self.samples: dict[str, list[int]] = {name: [] for name in self._processes}

    interval = 0.5
    """Seconds between two samples."""

    async def run(self) -> None:
        while True:
            for name, process in self._processes.items():
                self.samples[name].append(process.memory_info().rss)
            await asyncio.sleep(self.interval)

    def figures(self) -> dict[str, dict[str, float]]:
        """Growth from the least of the second quarter to that of the last, and slope, by process.

        What leaks is never given back, so it raises the least. A median also rises where more
        samples are taken while a prompt is read, as on a slower machine.
        """
        growth, slope = {}, {}
        for name, samples in self.samples.items():
            quarter, late = max(1, len(samples) // 4), samples[len(samples) // 2 :]
            least = min(samples[quarter : 2 * quarter])
            growth[name] = round((min(samples[-quarter:]) - least) / 2**20, 1)
            hours = [self.interval * i / 3600 for i in range(len(late))]
            slope[name] = round(statistics.linear_regression(hours, late).slope / 2**20, 1)
        return {GROWTH: growth, "memory, second half (MiB an hour)": slope}


async def bench(server: Server, model: str, is_over: asyncio.Event) -> int:
    """Run ``vllm bench serve`` on prompts of mixed lengths again and again; count its requests."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--base-url", server.address, "--model", MODEL, "--tokenizer", target_of(model)),
        *("--dataset-name", "random", "--random-input-len", str(MAX_MODEL_LEN[model] // 2 - 100)),
        *("--random-output-len", "64", "--random-range-ratio", "0.9", "--disable-tqdm"),
        *("--num-prompts", str(BENCH_PROMPTS), "--max-concurrency", "4", "--temperature", "0.7"),
        *("--save-result", "--result-dir", str(server.log.parent)),
        *("--result-filename", "bench.json"),
    ]
    num_completed = 0
    while not is_over.is_set():
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--seed", str(num_completed)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0, printed.decode()[-3000:]
        result = json.loads((server.log.parent / "bench.json").read_text())
        assert (result["completed"], result["failed"]) == (BENCH_PROMPTS, 0), result
        num_completed += BENCH_PROMPTS
    return num_completed


def check_nothing_is_kept(server: Server, has_triforce: bool = True, seconds: float = 30) -> None:
    """All blocks free, no request known, no private cache but the last request's own."""
    deadline = time.monotonic() + seconds
    while True:
        now = server.metrics()
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        busy = {name: now[f"vllm:{name}"] for name in names}
        if not any(busy.values()):
            break
        assert time.monotonic() < deadline, busy
        time.sleep(0.2)
    # Private caches are released at the next proposal: one more request, which keeps its own.
    tail = {"prompt": list(range(100, 500)), "max_tokens": 3, "temperature": 0, "model": MODEL}
    server.post("/v1/completions", tail)
    if has_triforce:
        held = server.rpc("triforce_held_requests")
        assert max(held.values()) <= 1, held


def soak(
    server: Server,
    model: str,
    wanted: Iterable[list[dict]],
    seed: int,
    has_bench: bool = False,
    has_triforce: bool = True,
) -> tuple[dict, Sent]:
    """Send the streams and check all but their answers; return the figures and the answers.

    Args:
        has_bench: whether there is a second client.
        has_triforce: False for stock vLLM's server.
    """
    before, start = server.metrics(), time.monotonic()
    watch, is_over = MemoryWatch(server), asyncio.Event()

    async def run() -> tuple[Sent, int]:
        watching = asyncio.create_task(watch.run())
        beside = asyncio.create_task(bench(server, model, is_over)) if has_bench else None
        sent = await send_all(server.address, model, wanted, seed)
        is_over.set()
        num_completed = await beside if beside else 0
        watching.cancel()
        return sent, num_completed

    sent, num_completed = asyncio.run(run())
    seconds = time.monotonic() - start
    check_nothing_is_kept(server, has_triforce)
    counted = Counter(change(before, server.metrics()))
    assert not counted["vllm:triforce_boundary_faults_total"]
    assert (counted["vllm:triforce_proposals_total"] > 0) == has_triforce
    requests, answers = zip(*sent)
    choices = [choice for its in answers for choice in its.choices.values()]
    figures = {
        "requests": len(requests),
        "requests of vLLM's client": num_completed,
        "with": Counter(itertools.chain.from_iterable(its["params"] for its in requests)),
        "left by the client": sum(its.is_aborted for its in answers),
        "prompt tokens": sum(its["prompt"]["length"] for its in requests),
        "tokens received": sum(len(choice.token_ids) for choice in choices),
        "finish reasons": Counter(itertools.chain(*(choice.finish_reasons for choice in choices))),
        "preemptions": int(counted["vllm:num_preemptions_total"]),
        "prefix cache hits (tokens)": int(counted["vllm:prefix_cache_hits_total"]),
        **{
            name: n for name, n in counted.items() if re.fullmatch(r"vllm:triforce_\w+_total", name)
        },
        **watch.figures(),
        "seconds": round(seconds, 1),
    }
    return figures, sent


def check_answers(model: str, sent: Sent) -> tuple[int, int]:
    """Check the answers as the fuzzer does.

    Returns:
        Greedy answers compared with stock vLLM's, and how many of them part at a tie of its own.
    """
    stock, settings, found = Stock(), settings_of(model), []
    for start in range(0, len(sent), 16):
        stream, answers = zip(*sent[start : start + 16])
        found += badly_answered(model, MAX_MODEL_LEN[model], stream, answers)
        found += stock.differences(settings, stream, answers)
    assert not found, "\n".join(found)
    return stock.num_compared, stock.num_ties


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="requests for so long, instead")
    parser.add_argument("--model", choices=MAX_MODEL_LEN, default="pair")
    parser.add_argument("--keys", type=json.loads, help="TriForce's, beside the draft or head")
    parser.add_argument("--bench", action="store_true", help="vllm bench serve at the same time")
    parser.add_argument(
        "--compare", type=int, default=2000, help="the answers of so many, the last"
    )
    parser.add_argument("--stock", action="store_true", help="stock vLLM, to compare its memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", action="store_true", help="requests with a seed, whole prompts")
    parser.add_argument("--max-growth-mib", type=float, default=32)
    args = parser.parse_args()
    asked = {"minutes": args.minutes} if args.minutes else {"count": args.requests}
    wanted = random_streams(settings_of(args.model, args.seeds), args.seed, **asked)
    keys = KEYS if args.keys is None else args.keys
    if args.keys is not None or args.model != "pair":
        draft = draft_of(args.model, "model" if args.model == "pair" else "head")
        keys = (args.keys or {}) | {"model": draft}
    arguments = [*SERVER, *(SMOLLM2 if args.model == "smollm2" else ())]
    if args.seeds:
        arguments += ["--max-num-batched-tokens", str(WHOLE_PROMPTS)]
    if not args.stock:
        arguments += [*TRIFORCE, json.dumps(keys | {"log_interval": 5})]
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(target_of(args.model), Path(folder) / "log", *arguments, **FLAT_MEMORY) as server,
    ):
        try:
            figures, sent = soak(server, args.model, wanted, args.seed, args.bench, not args.stock)
        except Exception:
            sys.stderr.write(server.text()[-6000:])
            raise
    print(json.dumps(figures, indent=2), flush=True)
    if args.model == "pair":
        assert figures["preemptions"], "nothing was preempted: the cache is too large for this load"
    compared, ties = check_answers(args.model, sent[-args.compare :])
    print(f"greedy outputs compared with stock vLLM: {compared}, of which {ties} part at a tie")
    growth = figures[GROWTH]
    assert max(growth.values()) < args.max_growth_mib, growth


if __name__ == "__main__":
    main()
