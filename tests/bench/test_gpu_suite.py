"""Promise: the GPU suite runs by itself: it goes on where it stopped, and one failure is one.

Steps are small scripts here; nothing of vLLM is imported.
"""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models import ROOT
from vllm_triforce_bench.gpu_suite.machine import prepare
from vllm_triforce_bench.gpu_suite.report import figures, log
from vllm_triforce_bench.gpu_suite.run import Step, run_steps
from vllm_triforce_bench.gpu_suite.state import MOST_CUTS, State
from vllm_triforce_bench.gpu_suite.steps import BACKENDS, BUDGETS, CELLS, STOCK, steps


def script(name: str, body: str, limit_s: float = 30, **more) -> Step:
    return Step(name, [sys.executable, "-S", "-c", body, "{result}"], limit_s, **more)


def writes(name: str, tmp_path, **more) -> Step:
    """Counts its runs in a file, and leaves a result."""
    body = (
        f"import sys; open({str(tmp_path / name)!r}, 'a').write('x');"
        f"open(sys.argv[1], 'w').write('{{\"ran\": \"{name}\"}}')"
    )
    return script(name, body, **more)


@pytest.fixture()
def run(tmp_path):
    def run(todo, deadline_s=1e9, environment=None, state=None):
        state = state or State(tmp_path / "state.json")
        return run_steps(todo, state, tmp_path, environment or {}, deadline_s), state.data["steps"]

    return run


def test_a_failing_step_is_recorded_and_the_rest_goes_on(run, tmp_path, capsys):
    broken = script("broken", "import sys; sys.exit('the reason')")
    todo = [
        writes("first", tmp_path),
        broken,
        writes("needy", tmp_path, needs=("broken",)),
        writes("last", tmp_path, needs=("first",)),
    ]
    complete, found = run(todo)
    assert complete
    assert {name: step["status"] for name, step in found.items()} == {
        "first": "done",
        "broken": "failed",
        "needy": "skipped",
        "last": "done",
    }
    assert found["first"]["result"] == {"ran": "first"}
    assert "the reason" in found["broken"]["log_tail"] and found["broken"]["result"] is None
    assert "broken" in found["needy"]["why"]


def test_a_step_may_say_that_it_has_nothing_to_do(run):
    says = """import sys; open(sys.argv[1], "w").write('{"skipped": "no such backend"}')"""
    _, found = run([script("idle", says)])
    assert found["idle"]["status"] == "skipped" and found["idle"]["why"] == "no such backend"


def test_what_is_done_is_not_done_again(run, tmp_path):
    todo = [writes("first", tmp_path), script("broken", "1 / 0"), writes("last", tmp_path)]
    run(todo)
    complete, found = run(todo)  # another call: the state is read from the file
    assert complete and found["broken"]["status"] == "failed"
    assert (tmp_path / "first").read_text() == "x" and (tmp_path / "last").read_text() == "x"


def test_the_deadline_stops_before_a_step_that_would_not_fit(run, tmp_path):
    todo = [writes("first", tmp_path), writes("long", tmp_path, least_s=20)]
    complete, found = run(todo, deadline_s=15)
    assert not complete and "long" not in found
    complete, found = run(todo, deadline_s=60)
    assert complete and found["long"]["status"] == "done"
    assert (tmp_path / "first").read_text() == "x"


SLEEP = "import time; time.sleep(60)"


def test_a_step_cut_off_by_the_deadline_is_tried_again_but_not_for_ever(run, tmp_path):
    todo = [script("sleeper", SLEEP, least_s=0.1), writes("last", tmp_path)]
    for _ in range(MOST_CUTS):
        complete, found = run(todo, deadline_s=0.5)
        assert not complete and found["sleeper"]["status"] == "cut"
    run(todo, deadline_s=0.5)
    complete, found = run(todo)
    assert complete and found["sleeper"]["status"] == "timeout"
    assert found["sleeper"]["seconds"] > 1 and found["last"]["status"] == "done"


def test_a_step_past_its_own_limit_is_ended_with_its_children(run, tmp_path):
    child = tmp_path / "child"
    body = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    complete, found = run([script("stuck", body, limit_s=2, least_s=0)])
    assert complete and found["stuck"]["status"] == "timeout"
    for _ in range(50):
        if not _is_running(int(child.read_text())):
            return
        time.sleep(0.1)
    pytest.fail("the child of an ended step runs on")


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_new_machine_goes_on_from_the_old_ones_results(run, tmp_path):
    run([writes("first", tmp_path)])
    earlier = tmp_path / "suite.json"
    os.replace(tmp_path / "state.json", earlier)
    state = State(tmp_path / "state.json", earlier)
    complete, found = run([writes("first", tmp_path), writes("last", tmp_path)], state=state)
    assert complete and found["last"]["status"] == "done"
    assert (tmp_path / "first").read_text() == "x"
    state.forget(["first"])
    run([writes("first", tmp_path)])
    assert (tmp_path / "first").read_text() == "xx"


def test_what_a_new_machine_lacks_is_made_again_where_it_is_needed(run, tmp_path):
    made, unused = tmp_path / "made", tmp_path / "unused"
    maker = writes("maker", tmp_path, leaves=made)
    idle = writes("idle", tmp_path, leaves=unused)
    user = writes("user", tmp_path, needs=("maker",))
    run([maker, idle])
    complete, found = run([maker, idle, user])
    assert complete and found["user"]["status"] == "done"
    assert (tmp_path / "maker").read_text() == "xx" and (tmp_path / "idle").read_text() == "x"
    run([maker, idle, user])
    assert (tmp_path / "maker").read_text() == "xx", "nobody needs it any more"


def test_the_steps_of_a_gpu_name_each_other_rightly(tmp_path):
    todo = steps("cuda", tmp_path)
    names = [step.name for step in todo]
    assert len(names) == len(set(names)) and names[0] == "smoke"
    for place, step in enumerate(todo):
        assert set(step.needs) <= set(names[:place])
        assert step.limit_s <= 560, "a step must fit into a call of ten minutes"
    assert {f"exact-{b.lower()}" for b in BACKENDS} <= set(names)
    assert {f"bench-{g}-{b or 'stock'}" for g in CELLS for b in (STOCK, *BUDGETS)} <= set(names)
    assert {"train-target", "train-draft", "pair"} <= set(names)
    for step in [*todo, *steps("cpu", tmp_path, tiny=True)]:
        command = step.command[1:] if step.command[1] != "-u" else step.command[2:]
        is_there = find_spec(command[1]) if command[0] == "-m" else Path(command[0]).is_file()
        assert is_there, command


FAKE_KIT = """mkdir -p "$2/vllm"; touch "$2/vllm/__init__.py"; echo ran >> "$2/runs"
echo "export PYTHONPATH=$2\\${PYTHONPATH:+:\\$PYTHONPATH} KIT_SAYS=yes"
"""


def test_a_bare_machine_gets_vllm_from_the_kit_and_the_plugins_entry_point(tmp_path, monkeypatch):
    """An interpreter that sees neither: ``-S`` leaves the virtual environment's packages out."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checkout = tmp_path / "checkout"  # without the egg-info that an editable installation leaves
    checkout.mkdir()
    for name in ("vllm_triforce", "setup.cfg"):
        (checkout / name).symlink_to(ROOT / name)
    monkeypatch.setattr("vllm_triforce_bench.gpu_suite.machine.ROOT", checkout)
    with pytest.raises(RuntimeError, match="give --kit"):
        prepare(tmp_path / "work", None)
    kit = tmp_path / "kit"
    kit.mkdir()
    (kit / "install.sh").write_text(FAKE_KIT)
    environment = prepare(tmp_path / "work", kit)
    assert environment["KIT_SAYS"] == "yes"
    code = (
        "from importlib.metadata import entry_points as e; import vllm;"
        "print(e(group='vllm.general_plugins')['triforce'].load())"
    )
    seen = subprocess.run(
        [bare, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert "function register" in seen.stdout, seen.stderr
    assert prepare(tmp_path / "work", kit) == environment
    assert (tmp_path / "work" / "site" / "runs").read_text() == "ran\n", "installed once only"


def test_the_report_is_made_of_what_is_there(tmp_path):
    """Half of a suite: one geometry without its stock run, one cell of another, a failed pair."""
    parts = dict(selection_ms=0.5, level1_step_ms=0.3, level2_pass_ms=4.4, verification_ms=0.1)
    ours = parts | dict(propose_ms=20.0, full_pass_ms=24.0, step_ms=44.0, rounds_per_step=4.0)

    def bench(geometry, budget, cells):
        result = {"geometry": geometry, "budget": budget, "cells": cells}
        result["parts_are_synchronized"] = True
        return {"status": "done", "seconds": 9.0, "result": result}

    ran = {
        "bench-a-stock": bench("a", 0, {"8000x1": {"step_ms": 20.0}, "4096x1": {"step_ms": 4.0}}),
        "bench-a-4096": bench("a", 4096, {"8000x1": ours, "32000x1": ours}),
        "bench-b-4096": bench("b", 4096, {"8000x1": ours}),
        "bench-b-stock": {"status": "failed", "seconds": 1.0, "result": None},
        "pair": {"status": "failed", "seconds": 1.0, "result": None},
    }
    found = figures(ran)
    (cell,) = found["cells"]
    assert cell["cell"] == "8000x1" and cell["level2_over_stock_4k"] == pytest.approx(1.1)
    assert cell["outside_the_levels"] == pytest.approx(0.9 / 44)
    assert cell["speedup"]["0.92"] > cell["speedup"]["0.8"] > 1
    text = log({"steps": ran, "machine": {"device": "some GPU"}}, found)
    assert "some GPU" in text and "a 4096 8000x1" in text and "failed" in text
    json.dumps(found)
    assert log({"steps": {}}, figures({})).startswith("{}")


def test_parts_of_a_step_add_up():
    from vllm_triforce.metrics.counters import LevelCounters
    from vllm_triforce_bench.gpu_suite.benchmark import parts_ms

    counters = LevelCounters(num_level2_passes=20)
    for part, seconds in (("selection", 0.01), ("level 1", 0.03), ("level 2", 0.1)):
        counters.add_time(part, seconds)
    parts = parts_ms(counters, num_steps=5, step_ms=50.0)
    assert parts["level1_step_ms"] == pytest.approx(0.75)  # 40 steps, two before each pass
    assert parts["level2_pass_ms"] == pytest.approx(5.0)  # 20 passes
    assert parts["rounds_per_step"] == 4
    assert parts["propose_ms"] + parts["full_pass_ms"] == pytest.approx(50.0)
    assert parts["selection_ms"] == pytest.approx(2.0)
