"""Run stock vLLM and TriForce side by side on a pretrained model and one long document.

    make demo                                     # SmolLM2-135M-Instruct, 6,000 tokens
    make demo ARGS="--variant gqa --context 7000"
    make demo ARGS=--toy                          # no download: 16,000 tokens, the embedded pair
    make demo ARGS="--target MODEL --draft MODEL --document FILE"

Both engines read the document once. Then each answers eight questions about it at T=0.7, and
continues it at T=0 and at T=1; ``--toy`` continues stretches of its text instead. The engines
differ in ``speculative_config`` alone, and take turns. Speeds are decode tokens per second from the
first token to the last, without prefill, which is the same work for both.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

# Both engines in this process; set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

HERE = Path(__file__).parent
STOCK, TRIFORCE = "stock vLLM", "TriForce"
QUESTIONS = (
    "What does the if statement do?",
    "When is the else clause of a while loop executed?",
    "Can a for loop change the list that it goes over?",
    "What is the finally clause of a try statement for?",
    "How are exceptions matched with except clauses?",
    "What does the break statement do in a for loop?",
    "What does continue do in a while loop?",
    "Which compound statements are there?",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="the embedded pair; no download")
    parser.add_argument(
        "--variant",
        default="mha",
        choices=("gqa", "mha"),
        help="SmolLM2 as released, or with the paper's geometry: a KV head for each query head",
    )
    parser.add_argument("--target", help="another model with a chat template")
    parser.add_argument("--draft", help="default: that of the targets here; '' for none")
    parser.add_argument(
        "--document", type=Path, help="default: Python's reference of compound statements"
    )
    parser.add_argument("--context", type=int, help="tokens of the document")
    parser.add_argument("--tokens", type=int, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, help="of the answers; default 0.7, --toy 0")
    parser.add_argument("--runs", type=int, default=3, help="stretches of the text, with --toy")
    parser.add_argument("--keys", type=json.loads, default={}, help="TriForce's keys, as JSON")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true", help="compile the models, as --toy does")
    parser.add_argument("--quiet", action="store_true", help="do not show the text")
    args = parser.parse_args()
    if args.toy:
        args.target = args.target or str(HERE / "models" / "target")
        args.draft = str(HERE / "models" / "draft") if args.draft is None else args.draft
        args.document = args.document or HERE / "prompts" / "held_out.txt"
        args.keys = {"retrieval_budget": 1024} | args.keys
        args.compile = True
    defaults = (16000, 128, 0.0) if args.toy else (6000, 32, 0.7)
    for name, default in zip(("context", "tokens", "temperature"), defaults):
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


@dataclass
class Task:
    """Describe one completion that both engines generate.

    Args:
        group: tasks of a group share a line of the summary.
        length: most tokens that are generated.
    """

    group: str
    title: str
    prompt: list[int]
    length: int
    params: dict


@dataclass
class Group:
    """Collect tokens and seconds after the first output, of each task by engine."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: {STOCK: [], TRIFORCE: []})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {STOCK: [], TRIFORCE: []})
    is_same: bool = True

    def speed(self, name: str) -> float:
        return sum(self.tokens[name]) / max(sum(self.seconds[name]), 1e-9)

    def ratios(self) -> list[float]:
        """Return TriForce's speed over stock vLLM's of each task; one-token answers have none."""
        ours, theirs = (zip(self.tokens[n], self.seconds[n]) for n in (TRIFORCE, STOCK))
        return [(n / s) / (m / t) for (n, s), (m, t) in zip(ours, theirs) if n and m]


def start_engine(args: argparse.Namespace, speculative_config: dict | None):
    from vllm import LLM

    return LLM(
        args.target,
        dtype=args.dtype,
        max_model_len=args.context + 512,
        max_num_seqs=2,
        enforce_eager=not args.compile,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        distributed_executor_backend="uni",
        speculative_config=speculative_config,
    )


def document_tasks(args: argparse.Namespace, tokenizer) -> list[Task]:
    """Make the questions and continuations: all prompts begin with the document."""
    if args.document is None:
        import pydoc_data.topics

        text = pydoc_data.topics.topics["compound"]
    else:
        text = args.document.read_text()
    document = tokenizer.decode(tokens_of(args, tokenizer, text)[: args.context])
    system = {"role": "system", "content": document}
    tasks = []
    for question in QUESTIONS:
        messages = [system, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        group = f"{len(QUESTIONS)} questions, T={args.temperature:g}"
        params = {"temperature": args.temperature}
        tasks.append(Task(group, question, prompt, args.tokens, params))
    start = args.context + 64
    while document in tokenizer.decode(tasks[0].prompt[: start - 1]):
        start -= 1  # without the end of its message
    whole = tasks[0].prompt[:start]
    for temperature in (0.0, 1.0):
        title = f"continuation, T={temperature:g}"
        params = {"temperature": temperature, "ignore_eos": True}
        tasks.append(Task(title, title, whole, 2 * args.tokens, params))
    return tasks


def toy_tasks(args: argparse.Namespace, tokenizer) -> list[Task]:
    tokens = tokens_of(args, tokenizer, args.document.read_text())
    stride = (len(tokens) - args.context) // max(1, args.runs)
    return [
        Task(
            f"{args.runs} continuations, T={args.temperature:g}",
            f"tokens {run * stride:,} to {run * stride + args.context:,} continued",
            tokens[run * stride :][: args.context],
            args.tokens,
            {"temperature": args.temperature, "ignore_eos": True},
        )
        for run in range(args.runs)
    ]


def tokens_of(args: argparse.Namespace, tokenizer, text: str) -> list[int]:
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) < args.context:
        sys.exit(f"the document has {len(tokens)} tokens; lower --context {args.context}")
    return tokens


def decode(llm, task: Task, show: bool, length: int | None = None) -> tuple[list[int], int, float]:
    """Stream one completion.

    Returns:
        Token ids, and tokens and seconds after the first output.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA
    params = SamplingParams(max_tokens=length or task.length, output_kind=kind, **task.params)
    engine = llm.llm_engine
    engine.add_request(f"demo-{time.monotonic_ns()}", {"prompt_token_ids": task.prompt}, params)
    tokens: list[int] = []
    first_time = last_time = 0.0
    first_count = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter()
            new = output.outputs[0]
            if not tokens and new.token_ids:
                first_time, first_count = now, len(new.token_ids)
            tokens += new.token_ids
            last_time = now
            if show:
                sys.stdout.write(new.text)
                sys.stdout.flush()
    return tokens, len(tokens) - first_count, last_time - first_time


def run_task(engines: dict, task: Task, group: Group, show: bool) -> None:
    """Run a task on both engines and record it in its group."""
    print(f"\n--- {task.title}")
    found = {}
    for name, llm in engines.items():
        if show:
            print(f"\n{name}:")
        found[name], count, seconds = decode(llm, task, show)
        group.tokens[name].append(count)
        group.seconds[name].append(seconds)
        speed = count / max(seconds, 1e-9)
        print(f"\n    {name:10} {len(found[name]):4} tokens, {speed:6.1f} tokens/s", flush=True)
    group.is_same &= found[STOCK] == found[TRIFORCE]


def show_summary(groups: dict[str, Group], counted: dict) -> None:
    print(f"\n{'tokens/s':28}{STOCK:>12}{TRIFORCE:>12}   ratio (of single tasks)")
    for name, group in groups.items():
        ratio = group.speed(TRIFORCE) / max(group.speed(STOCK), 1e-9)
        ratios = group.ratios()
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        print(
            f"{name:28}{group.speed(STOCK):12.1f}{group.speed(TRIFORCE):12.1f}"
            f"   {ratio:.2f}x {spread}"
        )
        if len(ratios) > 1:
            print(f"{'':28}{'':24}   {statistics.median(ratios):.2f}x, their median")
    print(f"\n{'TriForce':28}{'tokens a full pass':>20}{'level 1':>10}{'level 2':>10} accepted")
    for name, counters in counted.items():
        print(
            f"{name:28}{counters.mean_acceptance_length:20.2f}"
            f"{100 * counters.level1_acceptance_rate:9.0f}%"
            f"{100 * counters.level2_acceptance_rate:9.0f}%"
        )


def main() -> None:
    args = parse_args()
    began = time.perf_counter()
    if args.target is None:
        sys.path.insert(0, str(HERE / "models"))
        from smollm2 import prepare

        try:
            args.target = str(prepare() / args.variant)
        except RuntimeError as error:
            sys.exit(f"{error}; or run the embedded pair: make demo ARGS=--toy")
        if args.draft is None:
            args.draft = str(HERE / "models" / "smollm2_head")
    from vllm_triforce.metrics.report import counters_of

    keys = {"method": "triforce"} | ({"model": args.draft} if args.draft else {}) | args.keys
    print(f"target {args.target}, {args.dtype}; speculative_config {keys}")
    engines = {STOCK: start_engine(args, None), TRIFORCE: start_engine(args, keys)}
    print(f"engines up after {time.perf_counter() - began:.0f} s")
    make_tasks = toy_tasks if args.toy else document_tasks
    tasks = make_tasks(args, engines[STOCK].get_tokenizer())

    groups: dict[str, Group] = {}
    counted: dict = {}
    for number, task in enumerate(tasks):
        if args.toy or task.group not in groups:  # fills the prefix cache, compiles
            if args.toy or number == 0:
                print(f"\nreading {len(task.prompt):,} tokens", flush=True)
            for llm in engines.values():
                decode(llm, task, show=False, length=8)
        before = counters_of(engines[TRIFORCE])
        run_task(engines, task, groups.setdefault(task.group, Group()), not args.quiet)
        new = counters_of(engines[TRIFORCE]).since(before)
        counted[task.group] = counted[task.group].plus(new) if task.group in counted else new
    show_summary(groups, counted)
    greedy = {task.group for task in tasks if not task.params["temperature"]}
    same = all(groups[name].is_same for name in greedy)
    if greedy:
        print(f"\ngreedy outputs identical: {'yes' if same else 'NO'}")
    print(f"all done after {time.perf_counter() - began:.0f} s")
    sys.exit(not same)


if __name__ == "__main__":
    main()
