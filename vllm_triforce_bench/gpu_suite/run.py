"""Runs steps one after the other, each in a process of its own, until the call's time is up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_triforce_bench.gpu_suite.state import State


@dataclass(frozen=True)
class Step:
    """One process. ``{result}`` in its command is where it may write its JSON; what it writes under
    ``skipped`` is why it had nothing to do."""

    name: str
    command: list[str]
    limit_s: float
    needs: tuple[str, ...] = ()
    """Steps that must be done; if one is not, this one is skipped."""
    least_s: float = 30
    """Not begun where less of the call is left."""
    leaves: Path | None = None
    """A file for later steps; gone (another machine), a done step is run again if they need it."""
    environment: dict[str, str] = field(default_factory=dict)


def run_steps(
    steps: list[Step],
    state: State,
    work: Path,
    environment: dict[str, str],
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Runs what is not done yet; a step that fails is recorded and the rest goes on.

    Args:
        deadline_s: seconds that this call may take from now.

    Returns:
        Whether everything is done; if not, call again.
    """
    end = clock() + deadline_s
    for step in _to_do(steps, state):
        missing = [n for n in step.needs if state.data["steps"].get(n, {}).get("status") != "done"]
        if missing:
            state.record(step.name, "skipped", 0.0, why=f"needs {', '.join(missing)}")
            continue
        left = end - clock()
        if left < min(step.least_s, step.limit_s):
            return False
        _run(step, state, work, {**environment, **step.environment}, min(step.limit_s, left), clock)
        if not state.is_final(step.name):
            return False
    return True


def _to_do(steps: list[Step], state: State) -> list[Step]:
    wanted: list[Step] = []
    for step in reversed(steps):
        gone = step.leaves is not None and not step.leaves.exists()
        is_done = state.data["steps"].get(step.name, {}).get("status") == "done"
        needed = any(step.name in later.needs for later in wanted)
        if not state.is_final(step.name) or (is_done and gone and needed):
            wanted.insert(0, step)
    return wanted


def _run(step, state, work, environment, limit_s, clock) -> None:
    result, log = work / "results" / f"{step.name}.json", work / "logs" / f"{step.name}.log"
    for path in (result, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    command = [part.replace("{result}", str(result)) for part in step.command]
    print(f"-- {step.name}, at most {limit_s:.0f} s", flush=True)
    began = clock()
    with log.open("a") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # so that what it started ends with it
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = clock() - began
    if code == 0:
        status = "done"
    elif code is None:
        status = "cut" if limit_s < step.limit_s else "timeout"
    else:
        status = "failed"
    more = {"result": json.loads(result.read_text()) if result.exists() else None}
    if status == "done" and (why := (more["result"] or {}).get("skipped")):
        status, more["why"] = "skipped", why
    if status not in ("done", "skipped"):
        more["log_tail"] = log.read_text(errors="replace")[-1500:]
    state.record(step.name, status, seconds, **more)
    print(f"   {state.data['steps'][step.name]['status']} after {seconds:.0f} s", flush=True)
    if status == "failed":
        print(more["log_tail"][-600:], file=sys.stderr, flush=True)


def _end(process: subprocess.Popen) -> None:
    """Ends a step and its children: by their process group, which is the step's own."""
    for kind, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
