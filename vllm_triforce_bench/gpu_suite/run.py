"""Runs steps one after the other, each in a process of its own, until the call's time is up."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_triforce_bench.gpu_suite.items import after_a_kill, without_errors
from vllm_triforce_bench.gpu_suite.leftovers import end_leftovers, marked
from vllm_triforce_bench.gpu_suite.state import (
    MOST_TRIES,
    WEIGHT_OF_A_KILL,
    State,
    read_json,
    write_json,
)


@dataclass(frozen=True)
class Step:
    """One process. ``{result}`` in its command is where it may write its JSON, in one piece and as
    often as it likes (``items.py``); what stands there under ``skipped`` is why it had nothing to
    do."""

    name: str
    command: list[str]
    limit_s: float
    needs: tuple[str, ...] = ()
    """Steps that must be done, or items of steps ("smoke:import"); until then this one waits."""
    least_s: float = 30
    """Not begun where less of the call is left."""
    leaves: Path | None = None
    """A file for later steps; gone (another machine), a done step is run again if they need it.
    Written anew, the step got further."""
    environment: dict[str, str] = field(default_factory=dict)


def run_steps(
    steps: list[Step],
    state: State,
    work: Path,
    environment: dict[str, str],
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = 1.0,
) -> bool:
    """Runs what is not done yet; a step that fails is recorded and the rest goes on.

    Args:
        deadline_s: seconds that this call may take from now.
        poll_s: seconds from one look at a running step's result to the next.

    Returns:
        Whether nothing is left that another call could do.
    """
    end = clock() + deadline_s
    end_leftovers(work)
    for step in steps:
        if state.of(step.name).get("status") == "running":  # the call before was killed
            result = read_json(_result_of(step, work))
            if result is not None and "items" in result:
                result = after_a_kill(result, WEIGHT_OF_A_KILL)
                write_json(_result_of(step, work), result)
            more = {} if result is None else {"result": result}
            state.end(step.name, "killed", 0.0, _progress(step, work), **more)
    for step in _to_do(steps, state):
        missing = _missing(step, state)
        if missing:
            state.wait(step.name, f"needs {', '.join(missing)}")
            continue
        is_over = False
        while not is_over:
            left = end - clock()
            if left < min(step.least_s, step.limit_s):
                return False
            _run(step, state, work, environment, min(step.limit_s, left), clock, poll_s)
            is_over = state.is_final(step.name)
    return not any(not _missing(step, state) for step in _to_do(steps, state))


def _missing(step: Step, state: State) -> list[str]:
    return [need for need in step.needs if not state.meets(need)]


def _to_do(steps: list[Step], state: State) -> list[Step]:
    """What is not final, and what is but others wait for."""
    wanted: list[Step] = []
    for step in reversed(steps):
        needed = [n for later in wanted for n in later.needs if n.partition(":")[0] == step.name]
        if not state.is_final(step.name) or (needed and _is_needed_again(step, needed, state)):
            wanted.insert(0, step)
    return wanted


def _is_needed_again(step: Step, needed: list[str], state: State) -> bool:
    known = state.of(step.name)
    if known["status"] == "done" and step.leaves is not None and not step.leaves.exists():
        return True
    if all(map(state.meets, needed)) or known["status"] == "skipped":
        return False
    tries = known.get("tries", 0) if known.get("command") == _told(step) else 0
    return tries < MOST_TRIES


def _told(step: Step) -> str:
    return " ".join(step.command[1:])


def _result_of(step: Step, work: Path) -> Path:
    return work / "results" / f"{step.name}.json"


def _progress(step: Step, work: Path) -> str:
    """Another one whenever a step has got further: items done, or what it leaves."""
    result = read_json(_result_of(step, work)) or {}
    done = sorted(result["items"]) if "items" in result else result
    written = step.leaves.stat().st_mtime_ns if step.leaves and step.leaves.exists() else 0
    return hashlib.sha1(json.dumps([done, written], sort_keys=True).encode()).hexdigest()


def _prepare_result(step: Step, state: State, work: Path) -> None:
    """What an earlier run of the step left, here or on another machine, for it to go on from."""
    path, known = _result_of(step, work), state.of(step.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not known:  # never begun, or to be forgotten
        path.unlink(missing_ok=True)
        return
    result = read_json(path) or known.get("result")
    if result is None or "items" not in result:
        return
    is_retry = known["status"] in ("failed", "done")
    write_json(path, without_errors(result) if is_retry else result)


def _run(step: Step, state, work, environment, limit_s, clock, poll_s) -> None:
    result, log = _result_of(step, work), work / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    _prepare_result(step, state, work)
    command = [part.replace("{result}", str(result)) for part in step.command]
    print(f"-- {step.name}, at most {limit_s:.0f} s", flush=True)
    state.begin(step.name, _progress(step, work), _told(step))
    began, seen = clock(), None
    with log.open("a") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, **step.environment, **marked(work)},
            start_new_session=True,  # so that what it started ends with it
        )
        try:
            code = None
            while code is None and (left := limit_s - (clock() - began)) > 0:
                try:
                    code = process.wait(min(poll_s, left))
                except subprocess.TimeoutExpired:
                    if (now := read_json(result)) != seen:
                        state.note(step.name, now)
                        seen = now
        finally:
            _end(process)
    seconds = clock() - began
    if code is None:
        status = "cut" if limit_s < step.limit_s else "timeout"
    else:
        status = "done" if code == 0 else "crashed" if code < 0 else "failed"
    more: dict = {"result": read_json(result)}
    if status == "done" and (why := (more["result"] or {}).get("skipped")):
        status, more["why"] = "skipped", why
    if status not in ("done", "skipped"):
        more["log_tail"] = log.read_text(errors="replace")[-1500:]
    state.end(step.name, status, seconds, _progress(step, work), **more)
    print(f"   {state.of(step.name)['status']} after {seconds:.0f} s", flush=True)
    if status in ("failed", "crashed"):
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
