"""Profile decode steps: kernels, gaps between them, and the host's time; write JSON.

python -m benchmarks.gpu.profile_steps OUT.json TARGET [--draft DRAFT] [--keys JSON] ...
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.gpu.engines import make_engine

# A longer gap is a wait for the host, not the device's time between two kernels.
LONGEST_GAP_US = 50
NUM_WARMUP, NUM_TIMED, NUM_PROFILED = 8, 12, 3
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def by_kernel(events: list[dict], num_steps: int) -> dict:
    """Sum the events of the busiest stream of a trace.

    Returns:
        Milliseconds of a step, and for each kernel its count, time and the gap before it.
    """
    streams: dict[int, list[dict]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_DEVICE:
            streams[event["args"].get("stream")].append(event)
    if not streams:
        return {}
    main = sorted(max(streams.values(), key=len), key=lambda event: event["ts"])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    first = end = main[0]["ts"]
    waits = 0.0
    for event in main:
        gap = max(0.0, event["ts"] - end)
        is_wait = gap > LONGEST_GAP_US
        waits += gap * is_wait
        sums = (1, event["dur"], gap * (not is_wait))
        kernel = kernels[event["name"][:100]]
        kernels[event["name"][:100]] = [a + b for a, b in zip(kernel, sums)]
        end = max(end, event["ts"] + event["dur"])
    in_ms = 1e-3 / num_steps
    names = ("count", "us_each", "gap_us")
    rows = {
        name: dict(zip(names, (count / num_steps, us / count, gap / count)))
        for name, (count, us, gap) in sorted(kernels.items(), key=lambda item: -item[1][1])
    }
    return {
        "span_ms": (end - first) * in_ms,
        "busy_ms": sum(us for _, us, _ in kernels.values()) * in_ms,
        "gaps_ms": sum(gap for _, _, gap in kernels.values()) * in_ms,
        "waits_ms": waits * in_ms,
        "kernels": rows,
    }


def profile(llm, args: argparse.Namespace) -> dict:
    import torch
    from vllm import SamplingParams

    engine, draw = llm.llm_engine, torch.Generator().manual_seed(1)
    params = SamplingParams(
        temperature=args.temperature, max_tokens=400, ignore_eos=True, detokenize=False
    )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    for i in range(args.requests):
        prompt = torch.randint(3, vocab, (args.context,), generator=draw).tolist()
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    while len(started) < args.requests:
        started |= {o.request_id for o in engine.step() if o.outputs[0].token_ids}

    def steps(count: int) -> list[float]:
        """Return the host's milliseconds in each step; the device is idle before and after."""
        torch.cuda.synchronize()
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        return times

    steps(NUM_WARMUP)
    begin = time.perf_counter()
    host_ms = statistics.median(steps(NUM_TIMED))
    step_ms = 1e3 * (time.perf_counter() - begin) / NUM_TIMED
    with torch.profiler.profile() as profiler:
        steps(NUM_PROFILED)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return {"step_ms": step_ms, "host_ms": host_ms, **by_kernel(events, NUM_PROFILED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--keys", type=json.loads, help="TriForce's; none: stock vLLM")
    parser.add_argument("--context", type=int, default=122_000)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kv-gib", type=float, default=20)
    parser.add_argument("--small", action="store_true", help="for the emulated GPU")
    args = parser.parse_args()
    keys = args.keys
    if keys is not None and args.draft:
        keys = {"model": args.draft, **keys}
    llm = make_engine(
        args.target,
        keys,
        args.small,
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=max(8, args.requests),
        max_model_len=args.context + 600,
        kv_cache_memory_bytes=int(args.kv_gib * (1 << 30)),
        enable_prefix_caching=False,
    )
    import torch

    result = {"device": torch.cuda.get_device_name(), **vars(args), **profile(llm, args)}
    args.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print({name: result[name] for name in result if name != "kernels"})


if __name__ == "__main__":
    main()
