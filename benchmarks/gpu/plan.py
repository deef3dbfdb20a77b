"""Measure where a step's time goes and what acceptances bring, most valuable first.

    python -m benchmarks.gpu.plan OUT                     # the steps that have no result yet
    python -m benchmarks.gpu.plan OUT micro profile-fp8   # these

Each step is a process of ten minutes at most. It leaves OUT/STEP.json and OUT/STEP.log. A benchmark
that ran out of time goes on at the next call.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.models import MODELS, SMOKE, write_head, write_model

LIMIT_S = 580
# Of level 1's tokens, and of level 2's.
ACCEPTANCES = {"75": "0.75,0.95", "60": "0.6,0.95"}
METHODS = "stock,triforce:level1,triforce:all,triforce,triforce:fp8"
SMALL_METHODS = METHODS.removesuffix(",triforce:fp8")  # neither a CPU nor the emulation has fp8
ALWAYS = {"adaptive": False, "min_context": 0}
OFFLOAD_GIB = 12


def steps(out: Path, context: int, is_small: bool) -> dict[str, list[str]]:
    """Return the command of each step, after ``python -m``.

    Args:
        context: tokens of the longest prompts.
        is_small: True for tiny shapes, to rehearse.
    """
    geometry = SMOKE if is_small else MODELS["llama-3.1-8b"]
    target = write_model(geometry, out / "models" / geometry.name)
    head = write_head(geometry, out / "models" / f"{geometry.name}-head")
    few_layers = SMOKE if is_small else MODELS["smollm2-mha"]
    small_target = write_model(few_layers, out / "models" / few_layers.name)
    small = ["--small"] if is_small else []

    def profile(name: str, keys: dict | None = None) -> list[str]:
        given = [] if keys is None else ["--draft", head, "--keys", json.dumps(keys)]
        shape = ["--context", str(context), *given, *small]
        return ["benchmarks.gpu.profile_steps", str(out / f"{name}.json"), target, *shape]

    def bench(name: str, model: str, methods: str, *more: str) -> list[str]:
        engine = {"load_format": "dummy"} | ({"enforce_eager": True} if is_small else {})
        command = ["vllm_triforce.cli", "bench", "--target", model, "--methods", methods]
        command += ["--prompts", "vllm_triforce", "--dtypes", "bfloat16", "--top-p", "1"]
        return [*command, "--engine", json.dumps(engine), "--output", str(out / name), *more]

    def synthetic(name: str, rates: str, prompt: int, sizes: str, *more: str) -> list[str]:
        grid = ["--contexts", str(prompt), "--batch-sizes", "1,2" if is_small else sizes]
        grid += ["--tokens", "32" if is_small else "256", "--repetitions", "1", "--draft", head]
        alone = ["--engines-at-once", "1", "--synthetic-acceptances", rates]
        methods = SMALL_METHODS if is_small else METHODS
        return bench(name, target, methods, *grid, *alone, *more)

    contexts = {"100K": 400, "32K": 300} if is_small else {"100K": 100_000, "32K": 32_000}
    commands = {"micro": ["benchmarks.gpu.micro", str(out / "micro.json"), *small]}
    for name, keys in {"stock": None, "levels": ALWAYS, "fp8": {"level2_model": "fp8"}}.items():
        name = f"profile-{name}"
        commands[name] = profile(name, None if keys is None else ALWAYS | keys)
    for rate, rates in ACCEPTANCES.items():
        for prompt, tokens in contexts.items():
            name = f"synthetic-{rate}-{prompt}"
            commands[name] = synthetic(name, rates, tokens, "1,4,8")
    first = ["--contexts", "300" if is_small else "7500,30000", "--tokens", "16"]
    first += ["--batch-sizes", "1" if is_small else "1,8"]
    first += ["--repetitions", "2" if is_small else "10"]
    commands["first-token"] = bench("first-token", small_target, "stock,triforce", *first)
    memory = ["--triforce", json.dumps({"kv_offload_gib": OFFLOAD_GIB})]
    memory += ["--methods", "stock,triforce:all,triforce"]
    commands["host-memory"] = synthetic("host-memory", ACCEPTANCES["75"], context, "1", *memory)
    return commands


def run(out: Path, name: str, command: list[str]) -> bool:
    """Run a step; True if its result is there."""
    result, begin = out / f"{name}.json", time.monotonic()
    with (out / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # bench writes its report
            status = process.wait()
    if status == 0 and (out / name / "results.json").exists():
        shutil.copy(out / name / "results.json", result)
    print(f"{name}: status {status} after {time.monotonic() - begin:.0f} s", flush=True)
    return status == 0 and result.exists()


def main() -> int:
    """Return 1 if a step has no result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("steps", nargs="*", help="all without a result, if none is named")
    parser.add_argument("--context", type=int, default=122_000, help="of the longest prompts")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to rehearse")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    commands = steps(args.output, 400 if args.small else args.context, args.small)
    if unknown := set(args.steps) - commands.keys():
        parser.error(f"steps are {', '.join(commands)}, not {', '.join(unknown)}")
    missing = [n for n in args.steps or commands if not (args.output / f"{n}.json").exists()]
    return int(not all([run(args.output, name, commands[name]) for name in missing]))


if __name__ == "__main__":
    sys.exit(main())
