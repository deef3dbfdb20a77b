"""A short run of the fuzzer finds nothing, and would have found a fault of sampling."""

import json
import os
import sys

import pytest
import torch

from tests.asked import target_logits
from tests.child import run
from tests.fuzz.campaign import LEAST_P_VALUE
from tests.fuzz.distribution import Distribution
from tests.fuzz.drive import Answer, Choice, drive
from tests.fuzz.judge import Running
from tests.fuzz.models import target_of, tokens_of
from tests.models import PAIR
from tests.parity.disturbing import replaced
from tests.v2.environment import needs_interpreter, v2_environment
from vllm_triforce.runner_v1.draft_probs import DraftProbsStore

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not (PAIR / "target").exists(), reason=f"no model pair in {PAIR}"),
]

SETTINGS = {
    "model": "small",
    "lora": False,
    "engine": {
        "block_size": 32,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 8 * 25,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "scheduling_policy": "fcfs",
        "seed": 0,
    },
    "triforce": {
        "retrieval_budget": 128,
        "min_context": 0,
        "num_sink_tokens": 4,
        "num_recent_tokens": 60,
        "draft": "model",
        "num_speculative_tokens": 6,
        "gamma": 2,
        "adaptive": False,
        "levels": "1,2,3",
    },
}


def mixed_stream(number: int) -> list[dict]:
    """A greedy request in the batch's first row, and behind it sampled ones that are near their
    ends, so that their proposals are shorter than its own."""
    length = 256 + 4 + number % 8
    prompt = {"kind": "text", "start": 37 * number % 7000, "length": length, "shared": 256}
    greedy = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    sampled = {"max_tokens": 5, "temperature": 1.0, "ignore_eos": True, "n": 4}
    requests = [greedy] + [sampled] * 10
    return [{"prompt": prompt, "params": params, "arrive": 0} for params in requests]


@pytest.mark.thorough
def test_a_fault_of_sampling_is_caught_by_the_distribution():
    """Each token is handed up with the probability of its neighbour in the vocabulary."""

    def shifted(store, *step):
        rows = take(store, *step)
        return None if rows is None else rows.roll(1, 1)

    running, distribution = Running(SETTINGS), Distribution()
    pool = distribution.pools["without seed"]
    with replaced(DraftProbsStore, "take", shifted) as take:
        for number in range(120):
            torch.manual_seed(number)
            stream = mixed_stream(number)
            excluded = distribution.add("small", stream, drive(running.llm, "small", stream))
            if excluded or pool.p_value() < LEAST_P_VALUE:
                break
        else:
            pytest.fail(f"not caught: {pool.p_values()}")
    running.end()


@pytest.mark.parametrize(
    "runner, num_streams",
    [("v1", 3), pytest.param("v2", 1, marks=[pytest.mark.thorough, needs_interpreter])],
)
def test_short_run(runner, num_streams):
    """With one engine, in a process of its own."""
    environment = v2_environment() if runner == "v2" else {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fuzz", "--runner", runner, "--shrink-seconds", "0"]
    command += ["--minutes", "9", "--most-engines", "1", "--per-engine", str(num_streams)]
    printed = "\n" + run(*command, env=environment, timeout=600).stdout
    report = json.loads(printed[printed.rindex("\n{\n") :])
    assert not report["faults"]
    assert not report["engines that did not start"], report
    assert report["streams driven"] == num_streams


def test_an_excluded_token_is_found():
    """The distribution's own check: a token that top-k leaves out, and one that it does not."""
    prompt = {"kind": "text", "start": 3, "length": 40}
    logits = target_logits(target_of("small"), tokens_of("small", prompt), [5])[0]
    best, worst = int(logits.argmax()), int(logits.argmin())
    request = {"prompt": prompt, "params": {"temperature": 1.0, "top_k": 2}, "arrive": 0}
    for token, is_excluded in ((best, False), (worst, True)):
        answer = Answer(choices={0: Choice([token], [0], ["length"])}, num_finished=1)
        assert bool(Distribution().add("small", [request], [answer])) == is_excluded
