"""Soak: random requests in bursts through a server whose cache is too small for them.

    python -m tests.soak --requests 1000          # 10 to 25 minutes on 2 cores; --help for more
    python -m tests.soak --minutes 120 --keys '{}' --bench
    python -m tests.soak --minutes 120 --keys '{}' --bench --model smollm2

``--bench`` runs vLLM's own client, ``vllm bench serve``, again and again at the same time.

Prompts of 1 to 4,000 tokens and up to 160 more, random sampling parameters, priorities, grammars,
a tenth aborted while they stream; the controller chooses. Checked:
every greedy output equals stock vLLM's (float32; an aborted one as far as it came; ties as in
tests/generation.py), every request answered exactly once with as many tokens as vLLM counts, what
has a grammar follows it, all blocks and private caches free at the end, memory flat, no counter
falls, and nothing found wrong where proposals are handed up.

``seed`` on sampled requests is a run of its own (``--seeds``), prompts read whole: stock vLLM's
CPU build ends the engine on a seeded prompt that is read in chunks (patches/README.md).
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.models import corpus, draft_of, target_of
from tests.models import PAIR
from tests.parity.running import sampling_params
from tests.serving import MODEL, Server, change, serve

MAX_PROMPT = 4000
MAX_TOKENS = 160
MAX_OUTSTANDING = {"pair": 48, "smollm2": 6}
# 140 blocks of 32 tokens: 4,480, where one request may want 4,160 and sixteen run together.
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
WHOLE_PROMPTS = ["--max-num-batched-tokens", str(16 * 4352)]
KEYS = {"model": str(PAIR / "draft"), "retrieval_budget": 256}
# Its prompts take long to read, and 46 KiB of KV cache a token.
SMOLLM2 = ["--max-model-len", "6400", "--num-gpu-blocks-override", "320", "--max-num-seqs", "8"]
LONGEST = {"pair": MAX_PROMPT, "smollm2": 6000}
MAX_STOCK = {"pair": 10240, "smollm2": 6400}
BENCH_PROMPTS = 12


@dataclass
class Case:
    """A request, and what came of it."""

    prompt: list[int]
    params: dict
    abort_after: int | None
    """Chunks of the stream after which the client leaves."""
    token_ids: list[list[int]] = field(default_factory=list)
    """By choice."""
    finish_reasons: list[str | None] = field(default_factory=list)
    completion_tokens: int | None = None
    num_answers: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.params["temperature"] == 0


GRAMMAR = "[ a-m]{6,}"
_LETTERS = set(" abcdefghijklm")


def random_cases(
    count: int,
    seed: int,
    text: list[int],
    vocab_size: int = 4096,
    seeds: bool = False,
    longest: int = MAX_PROMPT,
) -> list[Case]:
    """Prompts are stretches of real text, some with a common beginning, or random tokens.

    Args:
        seeds: whether half of the sampled requests have a seed.
        longest: tokens of a prompt.
    """
    draw = random.Random(seed)
    shared = text[:600]
    # Sixteen that fit together when they come, and not for long before the first ends: preemption.
    growing = {"max_tokens": 2 * MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    cases = [Case(text[place : place + 200], growing, None) for place in range(0, 160, 10)]
    for _ in range(count - len(cases)):
        # Half of them evenly spread, half by magnitude.
        length = draw.randint(1, longest)
        if draw.random() < 0.5:
            length = int(longest ** draw.random())
        begin = draw.randrange(len(text) - length)
        prompt = text[begin : begin + length]
        kind = draw.random()
        if kind < 0.15:
            prompt = (shared + prompt)[:length]
        elif kind < 0.3:
            prompt = [draw.randrange(3, vocab_size) for _ in range(length)]
        params = {"max_tokens": draw.randint(1, MAX_TOKENS), "temperature": 0}
        if draw.random() < 0.4:
            params["temperature"] = draw.choice([0.3, 0.6, 0.8, 1.0, 1.3])
            params["top_p"] = draw.choice([1.0, 0.95, 0.9, 0.5])
            params["top_k"] = draw.choice([0, 1, 5, 50])
            params["n"] = draw.choice([1, 1, 1, 2, 3])
            if draw.random() < 0.3:
                params["min_p"] = draw.choice([0.02, 0.1, 0.3])
        if draw.random() < 0.1:
            tokens = draw.choices(prompt, k=min(8, length))
            params["logit_bias"] = {token: draw.choice([-100, -3, 2]) for token in tokens}
        if draw.random() < 0.2:
            params["repetition_penalty"] = draw.choice([1.05, 1.2])
            params["presence_penalty"] = draw.choice([0, 0.5])
            params["frequency_penalty"] = draw.choice([0, -0.2, 0.3])
        if draw.random() < 0.3:
            params["ignore_eos"] = True
        if draw.random() < 0.1:
            params["stop_token_ids"] = [draw.randrange(3, vocab_size) for _ in range(64)]
        if draw.random() < 0.1:
            params["min_tokens"] = draw.randint(1, params["max_tokens"])
        if draw.random() < 0.1:
            params["logprobs"] = draw.randint(1, 5)
        if draw.random() < 0.08:
            params["structured_outputs"] = {"regex": GRAMMAR}
            for name in ("ignore_eos", "min_tokens", "logit_bias"):  # may contradict it
                params.pop(name, None)
        if draw.random() < 0.3:
            params["priority"] = draw.choice([-1, 1, 2])
        if seeds and params["temperature"] and draw.random() < 0.5:
            params["seed"] = draw.randrange(1000)
        abort_after = draw.randint(0, 6) if draw.random() < 0.1 else None
        cases.append(Case(prompt, params, abort_after))
    return cases


async def send(client, case: Case) -> None:
    """One request with the openai client; an aborted one streams and leaves."""
    extra = dict(case.params, return_token_ids=True, add_special_tokens=False)
    standard = ("max_tokens", "temperature", "top_p", "n", "logprobs")
    known = {name: extra.pop(name) for name in standard if name in extra}
    arguments = dict(model=MODEL, prompt=case.prompt, extra_body=extra, **known)
    num_choices = case.params.get("n", 1)
    if case.abort_after is None:
        answer = await client.completions.create(**arguments)
        case.num_answers += 1
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        case.token_ids = [choice.token_ids for choice in choices]
        case.finish_reasons = [choice.finish_reason for choice in choices]
        case.completion_tokens = answer.usage.completion_tokens
        return
    case.token_ids = [[] for _ in range(num_choices)]
    case.finish_reasons = [None] * num_choices
    stream = await client.completions.create(stream=True, **arguments)
    for _ in range(case.abort_after):
        chunk = await anext(stream, None)
        if chunk is None:
            break
        for choice in chunk.choices:
            case.token_ids[choice.index] += choice.token_ids or []
            case.finish_reasons[choice.index] = choice.finish_reason
    await stream.close()
    case.num_answers += 1


def cases_for(minutes: float, seed: int, *args, **how) -> Iterator[Case]:
    """Draw ``random_cases()`` by the hundred until the time is over."""
    end = time.monotonic() + 60 * minutes
    for number in itertools.count():
        for case in random_cases(100, seed + number, *args, **how):
            if time.monotonic() > end:
                return
            yield case


async def drive(
    address: str,
    cases: Iterable[Case],
    seed: int,
    sent: list[Case],
    on_progress=None,
    model: str = "pair",
) -> None:
    """Sends the cases in bursts; at most MAX_OUTSTANDING[model] are under way.

    Args:
        sent: takes each case.
    """
    import openai

    draw = random.Random(seed + 1)
    gate = asyncio.Semaphore(MAX_OUTSTANDING[model])
    # While others keep coming, a request of low priority may wait for all of them.
    client = openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", timeout=7200, max_retries=0
    )

    async def one(case: Case) -> None:
        try:
            await send(client, case)
        finally:
            gate.release()

    tasks = []
    cases = iter(cases)
    while burst := list(itertools.islice(cases, draw.randint(1, 24) if tasks else 16)):
        for case in burst:
            await gate.acquire()
            sent.append(case)
            tasks.append(asyncio.create_task(one(case)))
        if on_progress is not None:
            on_progress(len(tasks))
        for task in tasks:
            if task.done():
                task.result()  # a request that failed ends the soak
        await asyncio.sleep(draw.expovariate(1.0))
    await asyncio.gather(*tasks)
    await client.close()


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

    def growth_mib(self) -> dict[str, float]:
        """From the least of the second quarter to that of the last, by process.

        What leaks is never given back, so it raises the least. A median also rises where more
        samples are taken while a prompt is read, as on a slower machine.
        """
        found = {}
        for name, samples in self.samples.items():
            quarter = max(1, len(samples) // 4)
            found[name] = (min(samples[-quarter:]) - min(samples[quarter : 2 * quarter])) / 2**20
        return found

    def slope_mib(self) -> dict[str, float]:
        """MiB an hour, of the line through the second half, by process."""
        found = {}
        for name, samples in self.samples.items():
            late = samples[len(samples) // 2 :]
            hours = [self.interval * i / 3600 for i in range(len(late))]
            found[name] = statistics.linear_regression(hours, late).slope / 2**20
        return found


class CounterWatch:
    """The server's counters, which must not fall; read as the soak goes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before: dict[str, float] = {}
        self.num_read = 0

    async def run(self, interval: float) -> None:
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(interval)

    def read(self) -> None:
        now = {
            name: value
            for name, value in self._server.metrics().items()
            if name.split("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))
        }
        fallen = {
            name: (value, now.get(name))
            for name, value in self._before.items()
            if now.get(name, -1) < value
        }
        assert not fallen, fallen
        self._before = now
        self.num_read += 1


class Bench:
    """``vllm bench serve`` with prompts of mixed lengths, run again and again."""

    def __init__(self, server: Server, model: str, folder: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        self.num_completed = 0
        self._result = folder / "bench.json"
        tokenizer = AutoTokenizer.from_pretrained(target_of(model))
        draw, text = random.Random(seed), corpus(model)
        lines = []
        for _ in range(BENCH_PROMPTS):
            length = int(50 * (LONGEST[model] / 50) ** draw.random())
            begin = draw.randrange(len(text) - length)
            # A text may have a few more tokens than those that it was made of.
            prompt = tokenizer.decode(text[begin : begin + length], skip_special_tokens=True)
            lines.append(json.dumps({"prompt": prompt, "output_tokens": draw.randint(8, 128)}))
        (folder / "bench.jsonl").write_text("\n".join(lines))
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--base-url", server.address, "--model", MODEL, "--tokenizer", target_of(model)),
            *("--dataset-name", "custom", "--dataset-path", str(folder / "bench.jsonl")),
            *("--custom-output-len", "-1", "--skip-chat-template", "--disable-tqdm"),
            *("--num-prompts", str(BENCH_PROMPTS), "--max-concurrency", "4"),
            *("--temperature", "0.7"),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"),
        ]

    async def run(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0, printed.decode()[-3000:]
            result = json.loads(self._result.read_text())
            assert (result["completed"], result["failed"]) == (BENCH_PROMPTS, 0), result
            self.num_completed += BENCH_PROMPTS


def check_answers(cases: list[Case]) -> None:
    """Nothing lost, nothing twice, and as many tokens as vLLM says."""
    for number, case in enumerate(cases):
        where = f"request {number}: {case.params}"
        assert case.num_answers == 1, f"{where}: {case.num_answers} answers"
        if case.abort_after is not None:
            continue
        assert len(case.token_ids) == case.params.get("n", 1), where
        assert sum(map(len, case.token_ids)) == case.completion_tokens, where
        for tokens, reason in zip(case.token_ids, case.finish_reasons):
            assert reason in ("length", "stop"), f"{where}: {reason}"
            if reason == "length":
                assert len(tokens) == case.params["max_tokens"], where
            assert len(tokens) >= case.params.get("min_tokens", 0), where


def check_grammars(tokenizer, cases: list[Case]) -> int:
    """Returns how many outputs have a grammar. vLLM lets a request's stop tokens end one
    (``v1/structured_output/__init__.py``)."""
    count = 0
    for case in cases:
        if "structured_outputs" in case.params:
            for tokens in case.token_ids:
                if tokens and tokens[-1] in case.params.get("stop_token_ids", ()):
                    tokens = tokens[:-1]
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                assert set(text) <= _LETTERS, (case.params, text)
                count += 1
    return count


def check_greedy(stock, cases: list[Case], chunk: int = 64) -> tuple[int, int]:
    """Compares greedy outputs with stock vLLM's.

    Returns:
        Outputs compared, and how many of them part at a tie of stock's own.
    """
    from tests.generation import assert_same_tokens
    from tests.outputs import run

    greedy = [case for case in cases if case.is_greedy and case.token_ids]
    num_ties = 0
    for start in range(0, len(greedy), chunk):
        some, params = greedy[start : start + chunk], []
        for case in some:  # as vLLM's ``LLM`` class takes them
            asked = {name: its for name, its in case.params.items() if name != "priority"}
            how = {"ignore_eos": False, "detokenize": "structured_outputs" in asked}
            params.append(sampling_params(how | asked))
        outputs = run(stock, [case.prompt for case in some], params)
        for case, output in zip(some, outputs):
            wanted, found = list(output.outputs[0].token_ids), case.token_ids[0]
            if case.finish_reasons[0] is None:  # aborted
                wanted = wanted[: len(found)]
            elif wanted == found:
                assert output.outputs[0].finish_reason == case.finish_reasons[0], case.params
            unshown = {"repetition_penalty", "logit_bias", "structured_outputs"}
            if wanted != found and unshown & case.params.keys():
                # Stock's log-probabilities are those before penalty and bias: they show no tie.
                raise AssertionError(f"{case.params}: stock {wanted}, TriForce {found}")
            num_ties += not assert_same_tokens(stock, case.prompt, wanted, found)
    return len(greedy), num_ties


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
    wanted: Iterable[Case],
    seed: int,
    on_progress=None,
    bench: Bench | None = None,
    model: str = "pair",
    has_triforce: bool = True,
) -> tuple[dict, list[Case]]:
    """Drives the cases and checks all but the greedy outputs; returns the figures and the cases.

    Args:
        bench: a second client.
        has_triforce: False for stock vLLM's server.
    """
    before, start = server.metrics(), time.monotonic()
    watch, counters, cases = MemoryWatch(server), CounterWatch(server), []

    async def run() -> None:
        watching = [asyncio.create_task(watch.run()), asyncio.create_task(counters.run(5))]
        is_over = asyncio.Event()
        beside = asyncio.create_task(bench.run(is_over)) if bench else None
        await drive(server.address, wanted, seed, cases, on_progress, model)
        is_over.set()
        if beside:
            await beside
        for task in watching:
            if task.done():
                task.result()  # a counter that fell
            task.cancel()

    asyncio.run(run())
    counters.read()
    seconds = time.monotonic() - start
    check_answers(cases)
    check_nothing_is_kept(server, has_triforce)
    counted = Counter(change(before, server.metrics()))
    assert not counted["vllm:triforce_boundary_faults_total"]
    assert (counted["vllm:triforce_proposals_total"] > 0) == has_triforce
    aborted = [case for case in cases if None in case.finish_reasons]
    figures = {
        "requests": len(cases),
        "requests of vLLM's client": bench.num_completed if bench else 0,
        "readings of the counters": counters.num_read,
        "greedy": sum(case.is_greedy for case in cases),
        "with": dict(Counter(itertools.chain.from_iterable(case.params for case in cases))),
        "left by the client": len(aborted),
        "prompt tokens": sum(len(case.prompt) for case in cases),
        "tokens received": sum(len(tokens) for case in cases for tokens in case.token_ids),
        "finish reasons": dict(Counter(r for c in cases for r in c.finish_reasons)),
        "preemptions": int(counted["vllm:num_preemptions_total"]),
        "prefix cache hits (tokens)": int(counted["vllm:prefix_cache_hits_total"]),
        "proposals": int(counted["vllm:triforce_proposals_total"]),
        **{
            name: n for name, n in counted.items() if re.fullmatch(r"vllm:triforce_\w+_total", name)
        },
        "memory growth (MiB)": {k: round(v, 1) for k, v in watch.growth_mib().items()},
        "memory, second half (MiB an hour)": {k: round(v, 1) for k, v in watch.slope_mib().items()},
        "seconds": round(seconds, 1),
    }
    return figures, cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="requests for so long, instead")
    parser.add_argument("--model", choices=LONGEST, default="pair")
    parser.add_argument("--keys", type=json.loads, help="TriForce's, beside the draft or head")
    parser.add_argument("--bench", action="store_true", help="vllm bench serve at the same time")
    parser.add_argument(
        "--compare", type=int, default=2000, help="greedy outputs of so many, the last"
    )
    parser.add_argument("--stock", action="store_true", help="stock vLLM, to compare its memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", action="store_true", help="requests with a seed, whole prompts")
    parser.add_argument("--max-growth-mib", type=float, default=32)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from transformers import AutoTokenizer

    target = target_of(args.model)
    tokenizer = AutoTokenizer.from_pretrained(target)
    text, how = corpus(args.model)[:12_000], {"vocab_size": len(tokenizer), "seeds": args.seeds}
    how["longest"] = LONGEST[args.model]
    cases: Iterable[Case] = random_cases(args.requests, args.seed, text, **how)
    if args.minutes:
        cases = cases_for(args.minutes, args.seed, text, **how)
    keys = KEYS if args.keys is None else args.keys
    if args.keys is not None or args.model != "pair":
        draft = draft_of(args.model, "model" if args.model == "pair" else "head")
        keys = (args.keys or {}) | {"model": draft}
    arguments = [*SERVER, *(WHOLE_PROMPTS if args.seeds else ())]
    arguments += SMOLLM2 if args.model == "smollm2" else []
    if not args.stock:
        arguments += [*TRIFORCE, json.dumps(keys | {"log_interval": 5})]

    def progress(sent: int) -> None:
        sys.stderr.write(f"{sent} sent, {time.strftime('%X')}\n")

    with (
        tempfile.TemporaryDirectory() as folder,
        serve(target, Path(folder) / "log", *arguments, **FLAT_MEMORY) as server,
    ):
        bench = Bench(server, args.model, Path(folder), args.seed) if args.bench else None
        try:
            figures, cases = soak(
                server, cases, args.seed, progress, bench, args.model, not args.stock
            )
        except Exception:
            sys.stderr.write(server.text()[-6000:])
            raise
    print(json.dumps(figures, indent=2), flush=True)
    if args.model == "pair":
        assert figures["preemptions"], "nothing was preempted: the cache is too large for this load"
    from vllm import LLM

    from tests.conftest import ENGINE

    print(f"outputs that follow their grammar: {check_grammars(tokenizer, cases)}")
    stock = LLM(target, max_model_len=MAX_STOCK[args.model], **ENGINE)
    compared, ties = check_greedy(stock, cases[-args.compare :])
    print(f"greedy outputs compared with stock vLLM: {compared}, of which {ties} part at a tie")
    growth = figures["memory growth (MiB)"]
    assert max(growth.values()) < args.max_growth_mib, growth


if __name__ == "__main__":
    main()
