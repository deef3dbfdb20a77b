"""Runs the GPU suite by itself and goes on where the last call stopped (docs/gpu-suite.md).

    SUITE=vllm_triforce_bench/gpu_suite/suite.py
    python3 $SUITE --kit .kit --out "$OUT" --deadline-s 570
    python3 $SUITE --device cpu --tiny --out build/suite        # a rehearsal

Leaves ``suite.json`` and ``suite.log`` in ``--out``, anew whenever something has been found. Ends
with 0 when all steps are done, with 3 when there is more to do (call again), with 1 when a step
failed or could not begin.
"""

import argparse
import fcntl
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm_triforce_bench.gpu_suite.ladder import IMPORT
from vllm_triforce_bench.gpu_suite.machine import prepare
from vllm_triforce_bench.gpu_suite.report import figures, log
from vllm_triforce_bench.gpu_suite.run import run_steps
from vllm_triforce_bench.gpu_suite.state import State, write_json
from vllm_triforce_bench.gpu_suite.steps import Plan

MORE_TO_DO = 3
WENT_WELL = ("done", "skipped")


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kit", type=Path, help="folder with install.sh, where vLLM is missing")
    parser.add_argument("--out", type=Path, required=True, help="for suite.json and suite.log")
    parser.add_argument("--work", type=Path, default=Path("/tmp/triforce-suite"))
    parser.add_argument("--resume", type=Path, help="suite.json of an earlier machine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: small models, few cells")
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="every engine with compilation mode 0 and cudagraph_mode FULL_DECODE_ONLY, should "
        "torch.compile fail",
    )
    parser.add_argument("--deadline-s", type=float, default=1e9, help="seconds for this call")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose names begin so")
    parser.add_argument("--again", nargs="+", default=[], help="steps to forget and run again")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and ends its step
    work = args.work.resolve()
    held = only_call(work)
    state = State(work / "state.json", args.resume, partial(write, out=args.out))
    todo = Plan(args.device, work, args.tiny, args.no_compile).steps()
    if args.only:
        todo = [step for step in todo if step.name.startswith(tuple(args.only))]
    state.forget([s.name for s in todo if args.again and s.name.startswith(tuple(args.again))])
    environment = prepare(work, args.kit)
    left = args.deadline_s - (time.monotonic() - began)
    is_complete = run_steps(todo, state, work, environment, left)
    os.close(held)
    print(write(state.data, args.out), flush=True)
    if not is_complete:
        return MORE_TO_DO
    return int(any(state.of(step.name).get("status") not in WENT_WELL for step in todo))


def only_call(work: Path) -> int:
    """Keeps other calls away from a folder: a file descriptor to be kept open.

    Raises:
        RuntimeError: another call is at work there.
    """
    work.mkdir(parents=True, exist_ok=True)
    held = os.open(work / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise RuntimeError(
            f"another call of the suite is at work in {work}; wait, or give --work"
        ) from None
    return held


def write(data: dict, out: Path) -> str:
    """The one JSON and the one log, which is returned. What was found is kept even where no
    figures can be made of it."""
    found, text = {}, ""
    items = (data["steps"].get("smoke", {}).get("result") or {}).get("items", {})
    data["machine"] = items.get(IMPORT) or data.get("machine", {})
    try:
        found = figures(data["steps"])
        text = log(data, found)
    except Exception as error:  # a log is not worth an hour on a GPU
        text = f"no figures: {type(error).__name__}: {error}\n"
    write_json(out / "suite.json", data | {"figures": found})
    fresh = out / ".suite.log.new"
    fresh.write_text(text)
    os.replace(fresh, out / "suite.log")
    return text


if __name__ == "__main__":
    sys.exit(main())
