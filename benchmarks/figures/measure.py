"""Measure the front page's picture with ``vllm-triforce bench``, and store every answer."""

import importlib.util
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import stored
from vllm_triforce_bench.bench import grid
from vllm_triforce_bench.bench.measurement import MEASUREMENTS
from vllm_triforce_bench.bench.methods import STOCK

TOKENS = 96
ARGUMENTS = [
    *("bench", "--target", "build/smollm2/gqa", "--draft", "examples/models/smollm2_head"),
    *("--prompts", "$TEXT", "--contexts", "512,2K,7000", "--tokens", str(TOKENS)),
    *("--temperatures", "0,1", "--top-p", "1", "--repetitions", "2"),
    *("--dtypes", "float32,bfloat16", "--methods", "stock,triforce,eagle3,ngram"),
    # Stock vLLM's default drafts the head's best token, which is accepted less often at T=1.
    *("--eagle3", '{"draft_sample_method": "probabilistic"}'),
    *("--engine", '{"enforce_eager": true, "block_size": 32, "max_num_seqs": 2}'),
]
"""Arguments of ``vllm-triforce``; ``$TEXT`` stands for Python's documentation."""
# Greedy outputs that differ are an exit code of their own: bfloat16 rounds.
MEASURED = (0, 1)


class Incomplete(Exception):
    """A benchmark ended before it had measured everything."""


def measure(folder: Path) -> int:
    """Run or resume the benchmark, and replace the stored results; return the exit code."""
    target = stored.ROOT / "build" / "smollm2" / "gqa"
    if not target.exists():
        print(f"{target} is missing: run python examples/models/smollm2.py", file=sys.stderr)
        return 2
    text = importlib.util.find_spec("pydoc_data.topics").origin  # type: ignore[union-attr]
    arguments = [text if argument == "$TEXT" else argument for argument in ARGUMENTS]
    command = [sys.executable, "-m", "vllm_triforce.cli", *arguments, "--output", str(folder)]
    code = subprocess.run(command, cwd=stored.ROOT).returncode  # type: ignore[arg-type]
    if code in MEASURED:
        stored.write("front", condense(folder))
    return code


def condense(folder: Path) -> dict:
    """Read the benchmark's folder; return the content of the JSON file.

    Raises:
        Incomplete: an answer is missing.
    """
    results = json.loads((folder / "results.json").read_text())
    environment, settings = results["environment"], results["settings"]
    device = environment["device"].replace("(R)", "").replace(" Processor", "")
    lines = (folder / MEASUREMENTS).read_text().splitlines()
    cells = grid.pairs_by_row([json.loads(line) for line in lines])
    rows = [_row(cell, pairs) for cell, pairs in cells if cell["method"] != STOCK]
    num_answers = sum(len(row["ratios"]) for row in rows)
    of_grid = math.prod(len(settings[name]) for name in ("dtypes", "contexts", "temperatures"))
    num_due = of_grid * settings["repetitions"] * (len(settings["methods"]) - 1)
    if num_answers < num_due:
        raise Incomplete(f"{folder} has {num_answers} of {num_due} answers: run it again")
    run = {
        "command": shlex.join(["vllm-triforce", *ARGUMENTS]).replace("'$TEXT'", '"$TEXT"'),
        "commit": environment["commit"],
        "date": environment["date"].partition(",")[0],
        "processor": f"{environment['cores']} cores of {device}{_vectors()}",
        "versions": {name: environment[name] for name in ("vLLM", "torch", "Python")},
    }
    return {
        "about": "Decode speed over stock vLLM: SmolLM2-135M-Instruct with its EAGLE-3 head, "
        f"one request, answers of {TOKENS} tokens",
        "note": "Not compiled; eagle3 samples its drafts, and bfloat16 is the checkpoint's dtype.",
        "runs": {"bench": run},
        "rows": rows,
    }


def _row(cell: dict, pairs: grid.Pairs) -> dict:
    """Return the ratios of a cell and method, answer by answer."""
    speeds = [tuple(record["decode_tokens_per_second"] for record in pair) for pair in pairs]
    row: dict = {"run": "bench"}
    row |= {name: cell[name] for name in ("dtype", "context", "temperature", "method")}
    row |= {
        "ratios": [round(own / stock, 3) for stock, own in speeds],
        "stock_tokens_per_second": [round(stock, 2) for stock, _ in speeds],
    }
    if verdicts := [record["greedy"]["outcome"] for _, record in pairs if record["greedy"]]:
        row["greedy"] = verdicts
    return row


def _vectors() -> str:
    """Name the vector instructions, which decide what a pass over several tokens costs."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    return f" {'with' if 'avx512f' in info.read_text() else 'without'} AVX-512"
