"""A short run of the fuzzer finds nothing, and would have found a fault that was there once.

Power, with the fault of ``power.py`` put back: what is handed to the rejection sampler gives it
away in the first stream, the tokens alone after some.
"""

import json
import os
import subprocess
import sys
import time

import pytest
from vllm.v1.structured_output import StructuredOutputManager

from tests.fuzz.distribution import Distribution, target_logits
from tests.fuzz.drive import Answer, Choice, drive
from tests.fuzz.judge import Running
from tests.fuzz.models import tokens_of
from tests.fuzz.power import SETTINGS, fault, streams_until_caught
from tests.models import PAIR, ROOT
from tests.parity.disturbing import replaced
from tests.v2.environment import needs_interpreter, v2_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not (PAIR / "target").exists(), reason=f"no model pair in {PAIR}"),
]

MOST_STREAMS = 120
LEAST_P_VALUE = 1e-5


@pytest.fixture(scope="module")
def running():
    started = Running(SETTINGS)
    yield started
    started.end()


def test_the_fault_is_caught_at_the_boundary(running):
    with fault(True):
        caught, _ = streams_until_caught(running, 0, 3, LEAST_P_VALUE, watches_boundary=True)
    assert caught == 1


@pytest.mark.thorough
def test_the_fault_is_caught_by_the_distribution(running):
    with fault(True):
        caught, judge = streams_until_caught(
            running, 0, MOST_STREAMS, LEAST_P_VALUE, watches_boundary=False
        )
    assert caught, judge.distribution.pools["without seed"].p_values()


def test_without_the_fault_nothing_is_caught(running):
    with fault(False):
        caught, judge = streams_until_caught(running, 1, 5, LEAST_P_VALUE, watches_boundary=True)
    assert caught is None, judge.distribution.pools["without seed"].p_values()


def test_a_grammar_that_takes_its_time_is_no_fault(running):
    """Until it is compiled, in a thread, thousands of steps may pass in which nothing runs."""

    def slowly(self, request):
        time.sleep(2)
        return compile_grammar(self, request)

    params = {"max_tokens": 4, "temperature": 0, "structured": {"classes": ["Z01234567"]}}
    prompt = {"kind": "text", "start": 3, "length": 40}
    with replaced(StructuredOutputManager, "_create_grammar", slowly) as compile_grammar:
        (answer,) = drive(running.llm, "small", [{"prompt": prompt, "params": params, "arrive": 0}])
    assert answer.num_finished == 1


def fuzzed(runner: str, num_streams: int) -> dict:
    """The report of a short run with one engine in a process of its own."""
    environment = v2_environment() if runner == "v2" else {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fuzz", "--runner", runner, "--shrink-seconds", "0"]
    command += ["--minutes", "9", "--most-engines", "1", "--per-engine", str(num_streams)]
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    printed = "\n" + child.stdout
    assert "\n{\n" in printed, child.stderr[-5000:]
    report = json.loads(printed[printed.rindex("\n{\n") :])
    assert not report["faults"], child.stdout[-20000:]
    assert not report["engines that did not start"], report
    return report


def test_short_run():
    assert fuzzed("v1", 3)["streams driven"] == 3


@pytest.mark.thorough
@needs_interpreter
def test_short_run_on_runner_v2():
    assert fuzzed("v2", 1)["streams driven"] == 1


def test_an_excluded_token_is_found():
    """The distribution's own check: a token that top-k leaves out, and one that it does not."""
    prompt = {"kind": "text", "start": 3, "length": 40}
    logits = target_logits("small", tokens_of("small", prompt), [5])[0]
    best, worst = int(logits.argmax()), int(logits.argmin())
    request = {"prompt": prompt, "params": {"temperature": 1.0, "top_k": 2}, "arrive": 0}
    for token, is_excluded in ((best, False), (worst, True)):
        answer = Answer(choices={0: Choice([token], [0], ["length"])}, num_finished=1)
        assert bool(Distribution().add("small", [request], [answer])) == is_excluded
