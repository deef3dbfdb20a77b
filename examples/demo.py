"""Continue a long prompt with stock vLLM and with TriForce, side by side.

    make demo                                   # 16,000 tokens of held-out source code, float32
    make demo ARGS="--context 32000 --tokens 96"
    make demo ARGS="--target MODEL --draft MODEL --prompt FILE"

The engines differ in ``speculative_config`` alone. Each run continues another stretch of the text
with one engine right after the other. The ratio compares decode tokens per second from the first
token to the last, without prefill, which is the same work for both.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

# Both engines in this process; set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=str(HERE / "models" / "target"))
    parser.add_argument("--draft", default=str(HERE / "models" / "draft"), help="'' for none")
    parser.add_argument("--prompt", default=str(HERE / "prompts" / "held_out.txt"))
    parser.add_argument("--context", type=int, default=16000, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--runs", type=int, default=3, help="stretches of the text to continue")
    parser.add_argument("--stride", type=int, default=5000, help="tokens between two stretches")
    parser.add_argument("--budget", type=int, default=1024, help="retrieval_budget, tokens")
    parser.add_argument("--gamma", type=int, help="default: adaptive")
    parser.add_argument("--num-speculative-tokens", type=int, help="default: adaptive")
    parser.add_argument("--fixed", action="store_true", help="fixed lengths: adaptive off")
    parser.add_argument("--keys", type=json.loads, default={}, help="further TriForce keys, JSON")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="do not compile the models")
    parser.add_argument("--quiet", action="store_true", help="do not show the text")
    return parser.parse_args()


def start_engine(args: argparse.Namespace, speculative_config: dict | None):
    from vllm import LLM

    return LLM(
        args.target,
        dtype=args.dtype,
        max_model_len=args.context + args.tokens + 64,
        max_num_seqs=2,
        enforce_eager=args.eager,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        distributed_executor_backend="uni",
        speculative_config=speculative_config,
    )


def decode(
    llm, prompt: list[int], args, show: bool, max_tokens: int | None = None
) -> tuple[list[int], float]:
    """Stream one completion.

    Returns:
        Token ids, and tokens per second after the first.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=max_tokens or args.tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    engine.add_request(f"demo-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    first_time = last_time = 0.0
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
    return tokens, (len(tokens) - first_count) / max(last_time - first_time, 1e-9)


def main() -> None:
    args = parse_args()
    from vllm_triforce.metrics.counters import LevelCounters
    from vllm_triforce.metrics.report import counters_of

    keys = {"method": "triforce", "retrieval_budget": args.budget}
    for name in ("gamma", "num_speculative_tokens"):
        if getattr(args, name) is not None:
            keys[name] = getattr(args, name)
    if args.fixed:
        keys["adaptive"] = False
    if args.draft:
        keys["model"] = args.draft
    keys |= args.keys
    began = time.perf_counter()
    print(f"target {args.target}, {args.dtype}; speculative_config {keys}")
    stock, triforce = start_engine(args, None), start_engine(args, keys)
    text = stock.get_tokenizer()(Path(args.prompt).read_text())["input_ids"]
    needed = args.context + (args.runs - 1) * args.stride
    if len(text) < needed:
        sys.exit(
            f"{args.prompt} has {len(text)} tokens; {needed} needed: lower --context or --runs"
        )
    print(f"engines up after {time.perf_counter() - began:.0f} s")

    engines = {"stock vLLM": stock, "TriForce": triforce}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    all_same = True
    counted = LevelCounters()
    seconds = 0.0
    for run in range(args.runs):
        prompt = text[run * args.stride :][: args.context]
        print(f"\nreading {len(prompt)} tokens")
        for llm in engines.values():  # fills the prefix cache, compiles
            decode(llm, prompt, args, show=False, max_tokens=8)
        outputs = {}
        for name, llm in engines.items():
            if not args.quiet:
                print(f"--- {name} continues ---")
            before = counters_of(triforce)
            outputs[name], speed = decode(llm, prompt, args, show=not args.quiet)
            speeds[name].append(speed)
            print(f"\nrun {run + 1}: {name:10} {speed:7.1f} tokens/s", flush=True)
        counted = counted.plus(counters_of(triforce).since(before))
        seconds += len(outputs["TriForce"]) / speeds["TriForce"][-1]
        all_same &= outputs["stock vLLM"] == outputs["TriForce"]

    ratios = [b / a for a, b in zip(speeds["stock vLLM"], speeds["TriForce"])]
    print(f"\n{args.context} tokens of context, {args.tokens} generated, T={args.temperature}")
    for name, values in speeds.items():
        print(f"{name:28} {statistics.median(values):7.1f} tokens/s (median of {len(values)})")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{'ratio':28} {statistics.median(ratios):7.2f}x ({spread})")
    print(f"{'mean acceptance length':28} {counted.mean_acceptance_length:7.2f}")
    print(f"{'proposals without level 2':28} {counted.num_direct_proposals:7d}", end=" ")
    print(f"of {counted.num_proposals}")
    print(f"{'level 1 acceptance rate':28} {100 * counted.level1_acceptance_rate:6.1f}%")
    print(f"{'level 2 acceptance rate':28} {100 * counted.level2_acceptance_rate:6.1f}%")
    print(f"{'level 2 acceptance per test':28} {100 * counted.level2_acceptance_per_test:6.1f}%")
    parts = {**counted.time_seconds}
    parts["level 3 and vLLM"] = max(0.0, seconds - sum(parts.values()))
    for part, value in parts.items():
        print(f"  time in {part:18} {100 * value / seconds:6.1f}%")
    if not args.temperature:
        print(f"outputs identical: {'yes' if all_same else 'NO'}")
    print(f"all done after {time.perf_counter() - began:.0f} s")
    if not args.temperature and not all_same:
        sys.exit(1)


if __name__ == "__main__":
    main()
