"""Run the cases on an emulated GPU and print each verdict: ``make emulated-gpu``.

The Python that runs this must be the emulation's (tools/gpu_emulation/setup.sh). With ``--device``
the cases run on the machine's own GPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.emulated_gpu.cases import Case, chosen, every_case
from tests.emulated_gpu.requests import Models, make_models
from tests.emulated_gpu.verdict import Verdict, judge
from tests.models import ROOT
from tools.plugin_folder import plugin_folder

LIMIT_S = 1800  # of a case, which may take 1100 on a busy machine


def environment(work: Path, on_device: bool) -> dict[str, str]:
    emulation = ROOT / "tools" / "gpu_emulation"
    vllm = os.environ.get("PYTHONPATH", "") if on_device else emulation
    path = [ROOT, vllm, plugin_folder(work / "plugin")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, path))),
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_TRIFORCE_CHECK": "raise",
        # Compiled modules are kept: to compile vLLM's takes 15 s a process.
        "PYTHONDONTWRITEBYTECODE": "",
    }


def run_case(
    launcher: list[str], env: dict[str, str], work: Path, models: dict[str, Models], case: Case
) -> Verdict:
    """Run a case in a process of its own.

    Args:
        work: what it reads and writes.
        models: by the kind of the target.
    """
    asked, result, log = (work / f"{case.name}.{kind}" for kind in ("asked", "json", "log"))
    task = {"case": dataclasses.asdict(case), **models[case.target]._asdict()}
    asked.write_text(json.dumps(task))
    command = [*launcher, "-m", "tests.emulated_gpu.run_case", str(asked), str(result)]
    begin, verdict = time.monotonic(), Verdict(case, 0)
    with log.open("w") as said:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            verdict.faults.append(f"stopped after {LIMIT_S} s")
    verdict.seconds = time.monotonic() - begin
    if result.exists():
        verdict.result = json.loads(result.read_text())
    elif not verdict.faults:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        verdict.faults.append(f"ended with status {done.returncode}:\n{end}")
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulated_gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", metavar="PATTERN", help="of names, as in a shell: '*quest*'")
    parser.add_argument("--list", action="store_true", help="the cases' names, and nothing else")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--device", action="store_true", help="on the GPU of this machine")
    args = parser.parse_args()
    try:
        cases = chosen(args.only) if args.only else every_case()
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print(*(case.name for case in cases), sep="\n")
        return
    verdicts = run_all(cases, args.jobs, args.device)
    num_failed = sum(bool(verdict.faults) for verdict in verdicts)
    print(f"{len(verdicts) - num_failed} of {len(verdicts)} cases passed")
    sys.exit(1 if num_failed else 0)


def line(verdict: Verdict) -> str:
    """Of one case, for people who wait."""
    said = "ok" if not verdict.faults else "FAILED: " + "; ".join(verdict.faults)
    parts = [f"{verdict.case.name}: {said}"]
    parts += [f"{len(verdict.ties)} at a tie"] * bool(verdict.ties)
    if result := verdict.result:
        parts += [f"{number} launches of a {part}" for part, number in result["launches"].items()]
    return ", ".join(parts) + f" ({verdict.seconds:.0f} s)"


def run_all(cases: list[Case], num_jobs: int, on_device: bool = False) -> list[Verdict]:
    """Says each case as soon as those before it have ended."""
    verdicts, results = [], {}
    launcher = [sys.executable, *([] if on_device else ["-m", "emu"])]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(num_jobs) as pool:
        folder = Path(name)
        models = {kind: make_models(folder / kind, kind) for kind in {c.target for c in cases}}
        run = partial(run_case, launcher, environment(folder, on_device), folder, models)
        for verdict in pool.map(run, cases):
            if verdict.result is not None:
                results[verdict.case] = verdict.result
                judge(verdict, results, models[verdict.case.target].target)
            verdicts.append(verdict)
            print(line(verdict), flush=True)
    return verdicts


if __name__ == "__main__":
    main()
