"""Promise: whatever is killed, and whenever: what was found is on disk, none of it is found again,
and the suite ends.

The suite runs as a program, with quick fakes for steps (``fake_suite.py``).
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.fake_suite import ITEMS, TRAINING_PARTS
from vllm_triforce_bench.gpu_suite import leftovers
from vllm_triforce_bench.gpu_suite.items import MOST_BEGUN, NO_END, after_a_kill
from vllm_triforce_bench.gpu_suite.state import (
    FINAL,
    MOST_CUTS,
    MOST_TRIES,
    WEIGHT_OF_A_KILL,
    read_json,
)
from vllm_triforce_bench.gpu_suite.suite import MORE_TO_DO

FAKE = Path(__file__).with_name("fake_suite.py")
STEPS = [*ITEMS, "single", "train"]
MOST_KILLS = 15
# Killed, asked to end, and asked before it listened.
ENDED = (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM)
# Beside the kills: a call for each try of a step that others wait for.
MOST_CALLS = MOST_KILLS + len(STEPS) * MOST_TRIES


class Suite:
    """Calls of the suite on one folder."""

    def __init__(self, folder: Path) -> None:
        self.work, self.out = folder / "work", folder / "out"

    def begin(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, FAKE, "--work", self.work, "--out", self.out, *arguments]
        with (self.work.parent / "log").open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def kept(self) -> dict[str, set[str]]:
        """What is on disk: items by step."""
        found = {}
        for path in (self.work / "results").glob("*.json"):
            found[path.stem] = set((read_json(path) or {}).get("items", {}))
        return found

    def journal(self) -> list[list[str]]:
        path = self.work / "journal"
        return (
            [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []
        )

    def told(self) -> dict:
        path = self.out / "suite.json"
        return json.loads(path.read_text())["steps"] if path.exists() else {}


def kill_steps(suite: Suite) -> None:
    for pid in leftovers._find(suite.work):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere_it_goes_on_and_ends(tmp_path, seed):
    dice, suite = random.Random(seed), Suite(tmp_path)
    num_kills = 0
    before: dict[str, set[str]] = {}
    for _ in range(MOST_CALLS):
        process = suite.begin()
        while num_kills < MOST_KILLS and process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0.02, 0.8))
                break
            num_kills += 1
            victim = dice.choice(["suite", "step", "both", "asked to end"])
            if victim in ("suite", "both"):
                process.kill()
            if victim in ("step", "both"):
                kill_steps(suite)
            if victim == "asked to end":
                process.terminate()
            if victim != "step":
                process.wait(20)
            said, now = suite.journal(), suite.kept()
            for name, items in before.items():
                # Of a step that failed, what went wrong is tried again.
                assert items <= now[name] or suite.told()[name]["tries"] > 1
            before = now
            for kind, step, *item in said:
                assert kind != "repeated", (step, item)
                if kind == "kept" and step in ITEMS:
                    assert item[0] in now[step], "found, and not on disk"
        process.wait(60)
        if process.returncode in (0, 1):
            break
        assert process.returncode in (MORE_TO_DO, *ENDED)
    assert process.returncode in (0, 1), (tmp_path / "log").read_text()
    assert num_kills >= 2, "it was hardly killed"
    check_the_end(suite, process.returncode)


def check_the_end(suite: Suite, code: int) -> None:
    """Everything is found and told; or was given up, after as many beginnings as are promised."""
    told, begun = suite.told(), Counter()
    for kind, step, *item in suite.journal():
        assert kind != "repeated", (step, item)
        begun[step, item[0]] += kind == "begin"
    assert told == json.loads((suite.work / "state.json").read_text())["steps"]
    assert code == int(any(told[name]["status"] != "done" for name in STEPS))
    for name in STEPS:
        its = told[name]
        assert its["status"] in (*FINAL, "waiting")
        if its["status"] == "done" and name in ITEMS:
            assert its["result"]["items"] == {
                item: {"found": f"{name} {item}"} for item in ITEMS[name]
            }
        if its["status"] == "waiting":
            (need,) = [n for n in ("smoke", "train") if n in its["why"]]
            assert told[need]["status"] != "done"
        for found in ((its.get("result") or {}).get("items") or {}).values():
            if "error" in found:
                assert NO_END in found["error"] and its["status"] != "done"
    if told["train"]["status"] == "done":
        assert (suite.work / "model").read_text() == str(TRAINING_PARTS)
    if told["single"]["status"] == "done":
        assert told["single"]["result"] == {"found": "single all of it"}
    for (step, _), count in begun.items():
        most = MOST_BEGUN if step in ITEMS else MOST_CUTS + 1
        assert count <= most / WEIGHT_OF_A_KILL * MOST_TRIES


def test_nothing_is_killed(tmp_path):
    suite = Suite(tmp_path)
    assert suite.begin().wait(60) == 0
    assert {its["status"] for its in suite.told().values()} == {"done"}
    check_the_end(suite, 0)
    count = len(suite.journal())
    assert suite.begin().wait(60) == 0 and len(suite.journal()) == count


def test_what_a_killed_call_left_running_is_ended_before_the_next_begins(tmp_path):
    """It would share the GPU, and write the same result."""
    suite = Suite(tmp_path)
    process = suite.begin()
    while not (left := leftovers._find(suite.work)):
        time.sleep(0.01)
    process.kill()
    process.wait()
    left = leftovers._find(suite.work) or left
    leftovers.end_leftovers(suite.work)
    assert left and not leftovers._find(suite.work)
    assert os.getpid() not in left


def test_a_second_call_at_the_same_time_is_refused(tmp_path):
    suite = Suite(tmp_path)
    first = suite.begin()
    while not (suite.work / "journal").exists():
        time.sleep(0.01)
    second = suite.begin()
    assert second.wait(30) == 1 and "another call" in (tmp_path / "log").read_text()
    assert first.wait(60) == 0


def test_a_new_machine_goes_on_with_half_a_step(tmp_path):
    """All that it gets is what was told of it until the old one was gone."""
    old, new = Suite(tmp_path / "old"), Suite(tmp_path / "new")
    for suite in (old, new):
        suite.work.mkdir(parents=True)
    process = old.begin()
    while len(((old.told().get("exact") or {}).get("result") or {}).get("items", ())) < 2:
        time.sleep(0.005)
    process.kill()
    kill_steps(old)
    process.wait()
    told = old.told()
    assert told["exact"]["status"] == "running", "it is told while a step runs"
    assert new.begin("--resume", str(old.out / "suite.json")).wait(60) == 0
    begun = [item[0] for kind, step, *item in new.journal() if (kind, step) == ("begin", "exact")]
    assert not set(begun) & set(told["exact"]["result"]["items"])
    assert set(new.told()["exact"]["result"]["items"]) == set(ITEMS["exact"])
    assert not any(step == "smoke" for _, step, *_ in new.journal())


def test_a_call_that_is_killed_is_hardly_the_fault_of_what_was_running():
    """Half of a beginning is taken back; of a crash before it nothing is."""
    before = {"items": {"done": {}}, "begun": {"running": 1, "crashed before": 2}}
    after = after_a_kill(before, WEIGHT_OF_A_KILL)
    assert after["items"] == before["items"]
    assert after["begun"] == {"running": 0.5, "crashed before": 1.5}
