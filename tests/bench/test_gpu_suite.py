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
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce_bench.gpu_suite.ladder import IMPORT, STOCK, TRIFORCE, modes, rung
from vllm_triforce_bench.gpu_suite.machine import prepare
from vllm_triforce_bench.gpu_suite.report import figures, log
from vllm_triforce_bench.gpu_suite.run import Step, run_steps
from vllm_triforce_bench.gpu_suite.smoke import LIMIT_S as RUNG_LIMIT_S
from vllm_triforce_bench.gpu_suite.state import MOST_CUTS, MOST_TRIES, State
from vllm_triforce_bench.gpu_suite.steps import BACKENDS, BUDGETS, CELLS, Plan
from vllm_triforce_bench.gpu_suite.suite import write


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
        complete = run_steps(todo, state, tmp_path, environment or {}, deadline_s, poll_s=0.02)
        return complete, state.data["steps"]

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
    assert not complete, "who waits may hope for another try"
    assert {name: step["status"] for name, step in found.items()} == {
        "first": "done",
        "broken": "failed",
        "needy": "waiting",
        "last": "done",
    }
    assert found["first"]["result"] == {"ran": "first"}
    assert "the reason" in found["broken"]["log_tail"] and found["broken"]["result"] is None
    assert "broken" in found["needy"]["why"]


def mended(tmp_path, **more) -> Step:
    """Fails until there is a file "mended"."""
    body = f"import pathlib, sys; sys.exit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())"
    return script("mended", body, **more)


def test_who_waits_runs_once_its_need_has_come_good(run, tmp_path):
    needy = writes("needy", tmp_path, needs=("mended",))
    todo = [mended(tmp_path), needy, writes("last", tmp_path, needs=("needy",))]
    _, found = run(todo)
    assert [found[step.name]["status"] for step in todo] == ["failed", "waiting", "waiting"]
    (tmp_path / "mended").touch()
    complete, found = run(todo)
    assert complete and {step["status"] for step in found.values()} == {"done"}
    assert (tmp_path / "needy").read_text() == "x"


def test_what_others_wait_for_is_tried_again_but_not_for_ever(run, tmp_path):
    body = f"open({str(tmp_path / 'broken')!r}, 'a').write('x'); raise SystemExit(1)"
    todo = [script("broken", body), writes("needy", tmp_path, needs=("broken",))]
    for _ in range(MOST_TRIES - 1):
        complete, _ = run(todo)
        assert not complete
    for _ in range(3):
        complete, found = run(todo)
        assert complete and found["needy"]["status"] == "waiting"
    assert (tmp_path / "broken").read_text() == "x" * MOST_TRIES
    other = [script("broken", "pass"), todo[1]]  # told something else: --no-compile, say
    complete, found = run(other)
    assert complete and found["needy"]["status"] == "done"


def test_nobody_tries_again_what_nobody_waits_for(run, tmp_path):
    complete, found = run([mended(tmp_path)])
    (tmp_path / "mended").touch()
    complete, found = run([mended(tmp_path)])
    assert complete and found["mended"]["status"] == "failed" and found["mended"]["tries"] == 1


def items(name: str, work: str, **more) -> Step:
    """A step with items; ``work`` has ``items`` and ``time``."""
    body = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r});"
        "from pathlib import Path; from vllm_triforce_bench.gpu_suite.items import Items;"
        f"items = Items(Path(sys.argv[1])); {work}; sys.exit(items.num_errors > 0)"
    )
    return script(name, body, **more)


def test_a_need_may_be_one_item_whatever_becomes_of_the_others(run, tmp_path):
    """A smoke step that hangs in its last rung does not keep the first rung's users waiting."""
    work = (
        "items.run('good', lambda: {'x': 1});"
        "items.run('bad', lambda: 1 / 0) if 'bad' not in items.found else None;"
        "time.sleep(60)"
    )
    todo = [
        items("smoke", work, limit_s=2, least_s=0),
        writes("of good", tmp_path, needs=("smoke:good",)),
        writes("of bad", tmp_path, needs=("smoke:bad",)),
        writes("of none", tmp_path, needs=("smoke:none",)),
    ]
    complete, found = run(todo)
    assert found["smoke"]["status"] == "timeout" and not complete
    assert found["smoke"]["result"]["items"]["good"] == {"x": 1}
    assert "ZeroDivisionError" in found["smoke"]["result"]["items"]["bad"]["error"]
    assert [found[f"of {item}"]["status"] for item in ("good", "bad", "none")] == [
        "done",
        "waiting",
        "waiting",
    ]


def test_a_step_that_its_limit_ends_goes_on_where_it_got_further(run, tmp_path):
    """Four items of a second each, and a limit of two and a half: nothing is done twice."""
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    work = f"[items.run(n, lambda: ({count}, time.sleep(1), {{}})[2]) for n in 'abcd']"
    complete, found = run([items("long", work, limit_s=2.5, least_s=0)])
    assert complete and found["long"]["status"] == "done"
    assert set(found["long"]["result"]["items"]) == set("abcd")
    assert 4 <= len((tmp_path / "count").read_text()) <= 4 + 2, "at most one is cut off each time"


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
        complete, found = run(todo, deadline_s=2)
        assert not complete and found["sleeper"]["status"] == "cut"
    run(todo, deadline_s=2)
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


@pytest.mark.parametrize("no_compile", [False, True])
@pytest.mark.parametrize("device, tiny", [("cuda", False), ("cpu", True), ("cpu", False)])
def test_the_steps_name_each_other_rightly(tmp_path, device, tiny, no_compile):
    todo = Plan(device, tmp_path, tiny, no_compile).steps()
    names = [step.name for step in todo]
    assert len(names) == len(set(names)) and names[0] == "smoke"
    rungs = {IMPORT}
    for mode in modes(device, no_compile):
        rungs |= {rung(mode, STOCK), rung(mode, TRIFORCE)}
    for place, step in enumerate(todo):
        for name, _, item in (need.partition(":") for need in step.needs):
            assert name in names[:place] and (not item or item in rungs)
        assert step.limit_s <= 560, "a step must fit into a call of ten minutes"
        command = step.command[1:] if step.command[1] != "-u" else step.command[2:]
        is_module = command[0] == "-m"
        script = Path(command[0])
        is_script = script.is_file() or (script / "__main__.py").is_file()
        is_there = find_spec(command[1]) if is_module else is_script
        assert is_there, command
        assert not is_module or ("--no-compile" in command) == no_compile


def test_the_order_of_the_steps_is_that_of_what_is_most_wanted(tmp_path):
    names = [step.name for step in Plan("cuda", tmp_path).steps()]
    first = ["smoke", "kernels", "exact-flash_attn"]
    first += [
        f"bench-{g}-{b}" for g in ("llama-2-7b-128k", "llama-3.1-8b") for b in ("stock", 4096)
    ]
    first += ["exact-flash_attn-offload", "offload-llama-2-7b-128k", "offload-llama-3.1-8b"]
    first += ["exact-triton_attn", "train-target", "train-draft", "export", "pair"]
    assert names[: len(first)] == first
    assert CELLS["llama-2-7b-128k"][0] == "122000x1" and CELLS["llama-3.1-8b"][0] == "100000x4"
    left_out_first = [n for n in names if n.startswith("bench-") and n not in first]
    assert names[-len(left_out_first) :] == left_out_first
    assert all("qwen3" in name or name.endswith("-1024") for name in left_out_first)
    assert {f"exact-{b.lower()}" for b in BACKENDS} <= set(names)
    assert {f"bench-{g}-{b or 'stock'}" for g in CELLS for b in (0, *BUDGETS)} <= set(names)


def test_smoke_has_time_for_a_rung_that_hangs(tmp_path):
    (smoke,) = (s for s in Plan("cuda", tmp_path).steps() if s.name == "smoke")
    assert smoke.limit_s == 300 and smoke.limit_s / 2 >= RUNG_LIMIT_S


MULTIPLIES = """
import triton, triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

@triton.jit
def multiply(a, b, c, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))

target = GPUTarget("cuda", 90, 32)  # an H200's
backend, context = make_backend(target), ir.context()
ir.load_dialects(context)
backend.load_dialects(context)
options = backend.parse_options({})
source = ASTSource(multiply, {n: "*fp32" for n in "abc"} | {"N": "constexpr"}, {"N": 32})
functions = backend.get_codegen_implementation(options)
print(source.make_ir(target, options, functions, backend.get_module_map(), context))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton; pip install triton==3.9.0")
def test_float32_is_multiplied_as_float32(tmp_path):
    """Triton's own default, which its kernels for attention take, is TF32: no GPU is needed to see
    what they are compiled to."""
    by_name = {step.name: step for step in Plan("cuda", tmp_path).steps()}
    program = tmp_path / "multiplies.py"  # triton reads the source of its kernels
    program.write_text(MULTIPLIES)

    def compiled(environment: dict[str, str]) -> str:
        (line,) = (
            line
            for line in subprocess.run(
                [sys.executable, program],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()
            if "tt.dot" in line
        )
        return line

    assert "tf32" in compiled(by_name["exact-flash_attn"].environment)
    assert "tf32" not in compiled(by_name["exact-triton_attn"].environment)


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


def offloaded() -> dict:
    """A result of ``offload.py`` of which one way failed."""
    plain = dict(step_ms=2000.0, staged_gb_per_step=60.0, staged_gb_per_s_of_steps=30.0)
    plain["offload"] = {"num_host_layers": 28, "bytes_per_second": 31e9}
    items = {
        "plain": plain,
        "triforce": {"error": "RuntimeError: why"},
        "speed-up": {"speedup": {"0.93": 9.1}},
    }
    return {"geometry": "a", "cell": "122000x1", "device_gib": 24.0, "items": items}


def test_the_report_is_made_of_what_is_there(tmp_path):
    """Half of a suite: one geometry without its stock run, one cell of another, a failed pair."""
    parts = dict(selection_ms=0.5, level1_step_ms=0.3, level2_pass_ms=4.4, verification_ms=0.1)
    ours = parts | dict(propose_ms=20.0, full_pass_ms=24.0, step_ms=44.0, rounds_per_step=4.0)
    ours["parts_are_synchronized"] = True
    error = {"error": "RuntimeError: the reason\nits traceback"}
    by_tokens = [(1.0, [(16.0, 0.02), (122000.0, 0.03)]), (7.0, [(16.0, 0.021), (122000.0, 0.04)])]
    measured = Measurements([(1.0, 0.02)], by_tokens, [(1, 0.005)], 0.001).to_dict()
    measured["runner"] = "v2"

    def bench(geometry, budget, cells):
        result = {"geometry": geometry, "budget": budget, "items": cells}
        return {"status": "done", "seconds": 9.0, "result": result}

    ran = {
        "bench-a-stock": bench("a", 0, {"8000x1": {"step_ms": 20.0}, "4096x1": {"step_ms": 4.0}}),
        "bench-a-4096": bench(
            "a", 4096, {"measured": measured, "8000x1": ours, "32000x1": ours, "32000x4": error}
        ),
        "smoke": {
            "status": "failed",
            "seconds": 3.0,
            "result": {"items": {"choosing": {"measured": measured}, "import": {}}},
        },
        "bench-b-4096": bench("b", 4096, {"8000x1": ours}),
        "bench-b-stock": {"status": "failed", "seconds": 1.0, "result": None},
        "pair": {"status": "failed", "seconds": 1.0, "result": None},
        "offload-a": {"status": "failed", "seconds": 5.0, "result": offloaded()},
    }
    found = figures(ran)
    (cell,) = found["cells"]
    assert cell["cell"] == "8000x1" and cell["level2_over_stock_4k"] == pytest.approx(1.1)
    assert cell["outside_the_levels"] == pytest.approx(0.9 / 44)
    assert cell["speedup"]["0.92"] > cell["speedup"]["0.8"] > 1
    text = log({"steps": ran, "machine": {"device": "some GPU"}}, found)
    assert "some GPU" in text and "a 4096 8000x1" in text and "failed" in text
    assert "32000x4: RuntimeError: the reason" in text and "its traceback" not in text
    assert "smoke (choosing), Model Runner v2" in text and "bench-a-4096 (measured)" in text
    assert "7 at 16: 21.00 122000: 40.00" in text and "level 2: 1: 5.00, +1.000" in text
    assert (
        "a 122000x1, 24 GiB, plain: 2000.0 ms a step, 60.0 GB staged, 30.0 GB/s of it; 28" in text
    )
    assert "speed-up over plain, by level 2's acceptance: 9.10x at 0.93" in text
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


def test_results_are_kept_where_no_log_can_be_made_of_them(tmp_path, monkeypatch):
    def fails(steps):
        raise KeyError("step_ms")

    monkeypatch.setattr("vllm_triforce_bench.gpu_suite.suite.figures", fails)
    text = write({"steps": {"smoke": {"status": "done", "seconds": 1.0}}}, tmp_path)
    assert "KeyError" in text and (tmp_path / "suite.log").read_text() == text
    assert json.loads((tmp_path / "suite.json").read_text())["steps"]["smoke"]["status"] == "done"
