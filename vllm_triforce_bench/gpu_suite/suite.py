"""Runs the GPU suite by itself and goes on where the last call stopped (docs/gpu-suite.md).

    SUITE=vllm_triforce_bench/gpu_suite/suite.py
    python3 $SUITE --kit .kit --out "$OUT" --deadline-s 570
    python3 $SUITE --device cpu --tiny --out build/suite        # a rehearsal

Leaves ``suite.json`` and ``suite.log`` in ``--out``. Ends with 0 when all steps are done, with 3
when there is more to do (call again), with 1 when a step failed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm_triforce_bench.gpu_suite.machine import prepare
from vllm_triforce_bench.gpu_suite.report import figures, log
from vllm_triforce_bench.gpu_suite.run import run_steps
from vllm_triforce_bench.gpu_suite.state import State
from vllm_triforce_bench.gpu_suite.steps import steps

MORE_TO_DO = 3


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kit", type=Path, help="folder with install.sh, where vLLM is missing")
    parser.add_argument("--out", type=Path, required=True, help="for suite.json and suite.log")
    parser.add_argument("--work", type=Path, default=Path("/tmp/triforce-suite"))
    parser.add_argument("--resume", type=Path, help="suite.json of an earlier machine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: small models, few cells")
    parser.add_argument("--deadline-s", type=float, default=1e9, help="seconds for this call")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose names begin so")
    parser.add_argument("--again", nargs="+", default=[], help="steps to forget and run again")
    args = parser.parse_args()

    work = args.work.resolve()
    state = State(work / "state.json", args.resume)
    todo = steps(args.device, work, args.tiny)
    if args.only:
        todo = [step for step in todo if step.name.startswith(tuple(args.only))]
    state.forget([s.name for s in todo if args.again and s.name.startswith(tuple(args.again))])
    environment = prepare(work, args.kit)
    left = args.deadline_s - (time.monotonic() - began)
    complete = run_steps(todo, state, work, environment, left)
    smoke = state.data["steps"].get("smoke", {}).get("result")
    state.data["machine"] = smoke or state.data.get("machine", {})
    state.save()
    write(state.data, args.out)
    if not complete:
        return MORE_TO_DO
    return int(any(s["status"] in ("failed", "timeout") for s in state.data["steps"].values()))


def write(data: dict, out: Path) -> None:
    """The one JSON and the one log."""
    found = figures(data["steps"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "suite.json").write_text(json.dumps(data | {"figures": found}, indent=1) + "\n")
    text = log(data, found)
    (out / "suite.log").write_text(text)
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
