"""Promise: within a step of the GPU suite, what goes wrong is one item's, and what is timed is what
is said.

Engines are fakes here; nothing of vLLM is imported.
"""

import json
import subprocess
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.models import ROOT
from vllm_triforce_bench.gpu_suite import benchmark, engine, offload
from vllm_triforce_bench.gpu_suite.engine import EndedEarly, decode, make_engine
from vllm_triforce_bench.gpu_suite.exactness import differences
from vllm_triforce_bench.gpu_suite.items import MOST_BEGUN, NO_END, Harmless, Items
from vllm_triforce_bench.gpu_suite.speedup import inner_loop, tokens_per_step


@dataclass
class Request:
    num_waits: int
    """Steps until its prompt has been read."""
    num_left: int
    num_sent: int = 0


@dataclass
class FakeEngine:
    """Reads one prompt after the other, some steps each; who decodes gets tokens meanwhile."""

    steps_a_prompt: int
    tokens_a_step: int
    requests: dict[str, Request] = field(default_factory=dict)
    num_steps: int = 0
    aborted: list[str] = field(default_factory=list)

    def add_request(self, name, prompt, params) -> None:
        waits = self.steps_a_prompt * (len(self.requests) + 1)
        self.requests[name] = Request(waits, params.max_tokens)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names) -> None:
        self.aborted += [name for name in names if self.requests.pop(name, None)]

    def step(self) -> list:
        self.num_steps += 1
        outputs = []
        for name, request in list(self.requests.items()):
            request.num_waits -= 1
            if request.num_waits >= 0:
                continue
            count = min(self.tokens_a_step if request.num_sent else 1, request.num_left)
            request.num_sent += count
            request.num_left -= count
            finished = request.num_left == 0
            if finished:
                del self.requests[name]
            entry = SimpleNamespace(logprob=-0.5), SimpleNamespace(logprob=-0.1)
            new = SimpleNamespace(
                token_ids=[7] * count, logprobs=[dict(zip((3, 7), entry))] * count
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[new], finished=finished))
        return outputs


@pytest.fixture()
def fake_vllm(monkeypatch):
    """In the place of the modules that steps take from vLLM."""
    vllm, params = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace
    vllm.LLM = lambda model, **arguments: SimpleNamespace(model=model, **arguments)
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setattr(engine, "_counters", lambda llm: None)


def llm(**sizes) -> SimpleNamespace:
    return SimpleNamespace(llm_engine=FakeEngine(**sizes))


def test_a_first_request_may_be_over_before_the_last_begins(fake_vllm):
    """Seven tokens a step, and six steps to read a prompt: with 96 tokens the first of four
    requests never meets the last, with eight times as many it does."""
    fake = llm(steps_a_prompt=6, tokens_a_step=7)
    with pytest.raises(EndedEarly, match=r"96 tokens .* all 4"):
        decode(fake, [[1]] * 4, 96, most_steps=96)
    assert not fake.llm_engine.requests, "nothing is left for the next cell"
    args = SimpleNamespace(num_steps=96, budget=4096)
    decoded = decode(fake, [[1]] * 4, benchmark._most_tokens(args), most_steps=96)
    assert decoded.num_steps > 80
    assert decoded.num_tokens == 4 * 7 * decoded.num_steps - 3, "the first ended with four of seven"


def test_timing_ends_after_as_many_steps_as_are_wanted(fake_vllm):
    fake = llm(steps_a_prompt=2, tokens_a_step=1)
    decoded = decode(fake, [[1]] * 3, 1000, most_steps=10)
    assert decoded.num_steps == 10 and decoded.num_tokens == 30
    assert len(fake.llm_engine.aborted) == 3 and not fake.llm_engine.requests
    assert fake.llm_engine.num_steps < 30


def test_without_a_limit_all_requests_go_on_to_their_ends(fake_vllm):
    decoded = decode(llm(steps_a_prompt=3, tokens_a_step=2), [[1]] * 2, 20)
    assert [len(ids) for ids in decoded.token_ids] == [20, 20]
    assert decoded.best[0] == [[(7, -0.1), (3, -0.5)]] * 20, "best first"


def arguments(tmp_path, *more: str):
    parser = engine.argument_parser("What it does.\n\nMore.")
    return parser.parse_args(
        ["--work", str(tmp_path), "--result", str(tmp_path / "result.json"), *more]
    )


def test_without_compiling_whole_decode_passes_are_captured(fake_vllm, tmp_path):
    args = arguments(tmp_path, "--no-compile", "--backend", "FLASH_ATTN")
    made = make_engine("model", args, {"gamma": 1}, gpu_memory_utilization=0.2)
    assert made.compilation_config == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert made.attention_backend == "FLASH_ATTN" and made.gpu_memory_utilization == 0.2
    assert made.speculative_config == {"method": "triforce", "gamma": 1}
    assert not hasattr(make_engine("model", args, enforce_eager=True), "compilation_config")
    assert not hasattr(make_engine("model", arguments(tmp_path)), "compilation_config")
    on_cpu = make_engine("model", arguments(tmp_path, "--no-compile", "--device", "cpu"))
    assert on_cpu.enforce_eager and not hasattr(on_cpu, "compilation_config")


def test_an_items_error_is_its_own(tmp_path):
    """Each is on disk before the next begins; an error starts the process anew, a harmless one
    does not."""
    path, restarts = tmp_path / "result.json", []
    items = Items(path, start_anew=lambda: restarts.append(1), geometry="some")

    def work(machine, name: str) -> dict:
        on_disk = json.loads(path.read_text())["items"]
        assert list(on_disk) == names[: names.index(name)]
        if name == "too early":
            raise EndedEarly("ask for more")
        return {"found": machine / (0 if name == "broken" else 2)}

    names = ["first", "too early", "broken", "last"]
    items.run_all(names, lambda: 10, work)
    found = json.loads(path.read_text())
    assert found["geometry"] == "some" and found["begun"] == {}
    assert found["items"]["first"] == found["items"]["last"] == {"found": 5}
    assert "EndedEarly: ask for more" in found["items"]["too early"]["error"]
    assert "ZeroDivisionError" in found["items"]["broken"]["error"]
    assert len(restarts) == 1 and items.num_errors == 2 and issubclass(EndedEarly, Harmless)


def test_an_engine_that_cannot_be_made_is_the_error_of_what_is_missing(tmp_path):
    items = Items(tmp_path / "result.json", start_anew=lambda: None)
    items.put("there", {"x": 1})
    items.run_all(["there", "a", "b"], lambda: {}["no memory"], lambda machine, name: {})
    assert items.found["there"] == {"x": 1}
    assert all("no memory" in items.found[name]["error"] for name in "ab")
    items.run_all(["there"], pytest.fail, pytest.fail)  # nothing is missing: none is made


RUNS = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from vllm_triforce_bench.gpu_suite.items import Items

def note(name):
    with open(sys.argv[2], "a") as file:
        print(os.getpid(), name, file=file)

def work(name):
    note(name)
    if name == "error":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "crash":
        os.abort()
    if name == "hang":
        time.sleep(60)
    return {{}}

items = Items(Path(sys.argv[1]), limit_s=1.0)
note("process")
for name in sys.argv[3:]:
    items.run(name, lambda name=name: work(name))
"""


def test_after_an_error_of_the_device_the_rest_is_run_in_a_new_process(tmp_path):
    result, notes = tmp_path / "result.json", tmp_path / "notes"
    program = tmp_path / "runs.py"
    program.write_text(RUNS)
    names = ["first", "error", "second", "hang", "third"]
    subprocess.run([sys.executable, "-S", program, result, notes, *names], check=True, timeout=60)
    lines = [line.split()[1] for line in notes.read_text().splitlines()]
    assert lines == [
        *("process", "first", "error"),
        *("process", "second", "hang"),
        *("process", "third"),
    ]
    found = json.loads(result.read_text())["items"]
    assert "illegal memory access" in found["error"]["error"]
    assert found["hang"]["error"] == "hang took more than 1.0 s"


def test_an_item_that_ends_its_process_is_given_up(tmp_path):
    result, notes = tmp_path / "result.json", tmp_path / "notes"
    program = tmp_path / "runs.py"
    program.write_text(RUNS)
    command = [sys.executable, "-S", program, result, notes, "crash", "last"]
    for _ in range(MOST_BEGUN):
        assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode < 0
    subprocess.run(command, check=True)
    assert json.loads(result.read_text())["items"] == {"crash": {"error": NO_END}, "last": {}}
    assert notes.read_text().count("crash") == MOST_BEGUN


def test_tokens_may_part_only_where_stocks_two_best_are_near():
    best = [[(1, -0.1), (2, -3.0)], [(5, -0.7), (6, -0.8)], [(3, -0.1), (4, -3.0)]]
    wanted = {"token_ids": [[1, 5, 3]], "best": [best]}

    def case(*tokens: int) -> dict:
        return differences(wanted, [list(tokens)], margin=0.125)

    assert case(1, 5, 3)["num_same"] == 1 and case(1, 5, 3)["ok"]
    near = case(1, 6, 9)  # what follows a parting is another text
    assert near["ok"] and near["num_same"] == 0
    assert near["parted"] == [{"place": 1, "margin": pytest.approx(0.1), "within_rounding": True}]
    assert not case(2, 5, 3)["ok"], "its log-probabilities are far apart"
    assert not case(1, 9, 3)["ok"], "none of the two best"
    assert not case(1, 5)["ok"], "too few"


KERNEL_TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
def test_spoils(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_after(): pass
@pytest.mark.skip(reason="none")
def test_skipped(): pass
"""


def test_a_kernel_that_spoils_the_device_is_one_of_the_tests(tmp_path):
    (tmp_path / "test_some.py").write_text(KERNEL_TESTS)
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "vllm_triforce_bench.gpu_suite.kernel_tests", str(tmp_path)]
    command += ["--work", str(tmp_path), "--result", str(result)]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        found = {n.split("::")[1]: i for n, i in json.loads(result.read_text())["items"].items()}
        assert [found[f"test_{n}"].get("outcome") for n in ("good", "after", "skipped")] == [
            "passed",
            "passed",
            "skipped",
        ]
        assert "assert 1 == 2" in found["test_bad"]["error"]
        assert "illegal memory" in found["test_spoils"]["error"]
    assert "5 items" in done.stdout or "5 deselected" in done.stdout or "no tests" in done.stdout


@pytest.mark.parametrize("way", [offload.PLAIN, offload.TRIFORCE])
@pytest.mark.parametrize("cell", ["122000x1", "32000x4"])
def test_an_offloaded_engine_has_room_for_its_requests_and_as_much_device_as_is_asked(
    monkeypatch, tmp_path, cell, way
):
    from vllm_triforce.config import TriForceConfig

    made = {}

    def make_engine(model, args, keys, **arguments):
        made.update(arguments, keys=keys)

    monkeypatch.setattr(offload, "make_engine", make_engine)
    monkeypatch.setattr(offload, "_total_memory", lambda: 141 * 2.0**30)
    args = SimpleNamespace(
        work=tmp_path,
        geometry="llama-3.1-8b",
        cell=cell,
        device_gib=23.5,
        budget=4096,
        num_steps=16,
    )
    geometry = offload.GEOMETRIES["llama-3.1-8b"]
    offload.engine(args, geometry, way)
    assert made["gpu_memory_utilization"] == pytest.approx(0.9 * 23.5 / 141)
    keys = made["keys"]
    config = TriForceConfig(**{k: v for k, v in keys.items() if k != "model"})
    config = config.with_defaults(True, keys.get("model"), True).resolve(16)
    assert config.is_plain == (way == offload.PLAIN)
    reach = config.num_speculative_tokens + config.gamma
    blocks = made["max_num_seqs"] * -(-(made["max_model_len"] + reach) // 16) + 1
    assert keys["kv_offload_gib"] * 2**30 >= blocks * 16 * geometry.kv_bytes_per_token
    context, _ = benchmark.sizes(cell)
    assert made["max_model_len"] >= context + args.num_steps * (config.num_speculative_tokens + 1)


def test_speculation_over_host_memory_is_compared_with_plain_decoding_there(tmp_path):
    items = Items(tmp_path / "result.json")
    offload.put_speedup(items)
    assert not items.found
    parts = dict(selection_ms=0.0, level1_step_ms=0.0, level2_pass_ms=10.0, verification_ms=0.0)
    items.put(offload.PLAIN, {"step_ms": 400.0})
    items.put(offload.TRIFORCE, parts | {"step_ms": 0.0, "full_pass_ms": 400.0})
    offload.put_speedup(items)
    rounds, _ = inner_loop(offload.LEVEL1, 16, 2)
    step = 400 + 10 * rounds
    for acceptance, found in items.found["speed-up"]["speedup"].items():
        assert found == pytest.approx(tokens_per_step(float(acceptance), 16) * 400 / step)
