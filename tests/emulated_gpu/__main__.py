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
from pathlib import Path

from tests.emulated_gpu.cases import Case, chosen, default_cases, every_case
from tests.emulated_gpu.requests import make_models
from tests.emulated_gpu.verdict import Exact, Verdict, judge, read_log
from tests.models import ROOT
from tools.plugin_folder import plugin_folder


class Runner:
    """Runs cases in processes of their own.

    Args:
        work: what they read and write.
        models: folders of target, draft and head, by the kind of the target.
        on_device: run on a real GPU; ``PYTHONPATH`` has vLLM there.
    """

    def __init__(
        self, work: Path, models: dict[str, tuple[str, str, str]], on_device: bool = False
    ) -> None:
        self._work = work
        self._models = models
        self._launcher = [] if on_device else ["-m", "emu"]
        emulation = ROOT / "tools" / "gpu_emulation"
        vllm = os.environ.get("PYTHONPATH", "") if on_device else emulation
        path = [ROOT, vllm, plugin_folder(work / "plugin")]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, path))),
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_TRIFORCE_CHECK": "raise",
            # Compiled modules are kept: to compile vLLM's takes 15 s a process.
            "PYTHONDONTWRITEBYTECODE": "",
        }

    def __call__(self, case: Case) -> Verdict:
        asked, result, log = (
            self._work / f"{case.name}.{kind}" for kind in ("asked", "json", "log")
        )
        target, draft, head = self._models[case.target]
        task = {"case": dataclasses.asdict(case), "target": target, "draft": draft, "head": head}
        asked.write_text(json.dumps(task))
        child = ["-m", "tests.emulated_gpu.run_case", str(asked), str(result)]
        begin = time.monotonic()
        faults = []
        with log.open("w") as said:
            try:
                done = subprocess.run(
                    [sys.executable, *self._launcher, *child],
                    cwd=ROOT,
                    env=self._environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    timeout=case.limit_s,
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = None
                faults.append(f"stopped after {case.limit_s} s")
        verdict = Verdict(case, time.monotonic() - begin, faults)
        if result.exists():
            verdict.result = json.loads(result.read_text())
        elif status is not None:
            faults.append(f"ended with status {status}:\n{read_log(log)}")
        return verdict


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulated_gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", metavar="PATTERN", help="of names, as in a shell: '*quest*'")
    parser.add_argument("--all", action="store_true", help="also what takes long: 2 hours")
    parser.add_argument("--list", action="store_true", help="the cases' names, and nothing else")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--device", action="store_true", help="on the GPU of this machine")
    args = parser.parse_args()
    try:
        cases = chosen(args.only) if args.only else every_case() if args.all else default_cases()
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
    result = verdict.result or {}
    said = "ok" if not verdict.faults else "FAILED: " + "; ".join(verdict.faults)
    parts = [f"{verdict.case.name}: {said}"]
    if result:
        parts.append(greedy(verdict))
        if verdict.case.graphs:
            parts.append("{} graphs, {} replays".format(*result["graphs"]))
        parts += [f"{number} launches of a {part}" for part, number in result["launches"].items()]
        if counters := result["counters"]:
            parts.append(f"{counters['num_proposals']} proposals")
            parts.append(f"{counters['num_level2_passes']} passes of level 2")
    return ", ".join(parts) + f" ({verdict.seconds:.0f} s)"


def greedy(verdict: Verdict) -> str:
    """How the greedy requests compare with stock vLLM's."""
    if not verdict.num_compared:
        return "not compared"
    if verdict.num_parted:
        return f"{verdict.num_parted} not stock vLLM's"
    if verdict.ties:
        return f"identical but for {len(verdict.ties)} tie{'s' * (len(verdict.ties) > 1)}"
    return "identical"


def run_all(cases: list[Case], num_jobs: int, on_device: bool = False) -> list[Verdict]:
    """Says each case as soon as those before it have ended."""
    verdicts, results = [], {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_jobs) as pool:
        models = {
            kind: make_models(Path(folder) / kind, kind) for kind in {case.target for case in cases}
        }
        exact = {kind: Exact(target) for kind, (target, *_) in models.items()}
        for verdict in pool.map(Runner(Path(folder), models, on_device), cases):
            if verdict.result is not None:
                results[verdict.case] = verdict.result
                judge(verdict, results, exact[verdict.case.target])
            verdicts.append(verdict)
            print(line(verdict), flush=True)
    return verdicts


if __name__ == "__main__":
    main()
