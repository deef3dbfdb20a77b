"""Model Runner V2: greedy output is stock vLLM's, sampled output has the target's distribution.

Triton's interpreter must be in place before vLLM is imported, so each group of cases runs in a
process of its own (``run_case.py``) and reports JSON.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.models import PAIR, ROOT
from tests.v2.run_case import MARKER
from vllm_triforce.selection import POLICIES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="Model Runner V2 needs triton; pip install triton==3.9.0 (its interpreter is used)",
    ),
]

# Of a right distribution, once in ten thousand runs; the runs are seeded, so it is never or ever.
LEAST_P_VALUE = 1e-4


def run_group(*name: str) -> dict:
    support = [str(ROOT / "tests" / "v2" / "support"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, support)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.v2.run_case", *name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr[-5000:]
    line = next(line for line in child.stdout.splitlines() if line.startswith(MARKER))
    return json.loads(line.removeprefix(MARKER))


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"retrieval"}))
def test_every_policy_selects_and_keeps_the_output(greedy, policy):
    found = greedy[f"policy_{policy}"]
    assert found["same"]
    assert found["counters"]["num_level2_passes"] > 4


@pytest.fixture(scope="module")
def greedy() -> dict:
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    return run_group("greedy")


@pytest.fixture(scope="module")
def sampling() -> dict:
    return run_group("sampling")


@pytest.fixture(scope="module")
def faults() -> dict:
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    return run_group("faults")


@pytest.mark.parametrize("level1", ["draft", "lookup"])
def test_greedy_tokens_are_those_of_stock(greedy, level1):
    found = greedy[level1]
    assert found["alone"]
    assert found["mixed"], "700, 90 and 400 tokens, prefilled in chunks, in one batch"
    assert found["ends"], "max_tokens and max_model_len inside a proposal"
    assert found["counters"]["num_level2_accepted"] > 0
    assert found["counters"]["num_level3_steps"] > 0


@pytest.mark.parametrize("level1", ["draft", "lookup"])
def test_only_long_requests_are_verified(greedy, level1):
    """What the scheduler is told after each step, for requests of 700, 90 and 400 tokens."""
    long, short, middle = greedy[level1]["announced"]
    assert long[0] == 6 and middle[0] == 6
    assert len(long) < 14 and len(middle) < 14
    assert short == [0] * 14


@pytest.mark.parametrize("level1", ["draft", "lookup"])
def test_padding_changes_no_greedy_token(greedy, level1):
    """The full pass verifies six tokens of every request, proposed or not."""
    assert greedy[level1]["padded"]


def test_draft_has_no_part_in_vllms_kv_cache(greedy):
    assert greedy["draft"]["num_draft_layers"] > 0
    assert greedy["draft"]["draft_layers_in_kv_cache"] == 0


def test_budget_that_covers_the_context_is_always_right(greedy):
    assert greedy["full_budget"]["same"]
    assert greedy["full_budget"]["counters"]["num_level2_drafted"] > 10
    assert greedy["full_budget"]["counters"]["level2_acceptance_rate"] == 1


def test_layers_with_a_window_stay_dense(greedy):
    found = greedy["windows"]
    assert found["small"] and found["covering"]
    assert found["small_counters"]["num_level3_rejections"] > 0
    covering = found["covering_counters"]
    assert covering["num_level2_accepted"] == covering["num_level2_drafted"] > 10


def test_preempted_and_finished_requests_leave_nothing_behind(greedy):
    found = greedy["preemption"]
    assert found["num_preempted"] > 0
    assert found["same"]
    assert found["known_at_end"] == 1, "only the last request, until the next one comes"
    assert found["num_free_slots"] == found["num_slots"] - 1


@pytest.mark.parametrize("case", ["draft_t1", "lookup_narrow", "various", "padded", "full_budget"])
def test_sampled_tokens_have_the_targets_distribution(sampling, case):
    """T 1; T 0.6 and top-p 0.9; different parameters in one batch; padding in between."""
    found = sampling[case]
    assert found["num_tokens"] >= 100
    assert found["frequency"] > LEAST_P_VALUE
    assert found["transform"] > LEAST_P_VALUE
    assert found["least_prob"] > 0, "a token that the target's sampling parameters exclude"
    assert found["greedy_right"]


def test_drafted_tokens_are_both_accepted_and_rejected(sampling):
    for case in ("draft_t1", "lookup_narrow", "various", "padded"):
        assert 0.2 < sampling[case]["level2_acceptance_rate"] < 0.8


def test_rejection_sampler_reads_back_level_2s_own_distribution(sampling):
    """Level 2 and level 3 agree, so a single rejection would mean that the distribution lost
    something on its way through V2's draft logits."""
    assert sampling["full_budget"]["level2_acceptance_rate"] == 1


def test_a_wrong_distribution_is_noticed(sampling):
    found = sampling["wrong_temperature"]
    assert min(found["frequency"], found["transform"]) < LEAST_P_VALUE


def test_seeded_requests_are_reproducible(sampling):
    assert sampling["seed_reproduces"]


@pytest.mark.parametrize(("kind", "level"), [("greedy", 1), ("sampled", 1), ("sampled", 2)])
def test_nan_costs_a_request_its_speculation_and_nothing_else(faults, kind, level):
    """Sampled requests have top_k=1, so that there is one right answer."""
    found = faults[f"nan_{kind}_{level}"]
    assert found["poisoned"] and found["nan_requests"] == 1
    assert found["same"]
    assert 3 in found["rows"] and found["rows"][-1] < 3, "it is disabled, the others are not"
    assert found["accepted"] > 0
    assert found["finite"], "what it may have reached is cleaned"
    # What comes after is as if nothing had been.
    assert found["same_again"] and found["nan_requests_again"] == 0
    assert found["accepted_again"] > found["accepted"]
    assert found["held"]["disabled"] == 0


def test_named_logprobs_come_beside_speculation(faults):
    """vLLM's rejection sampler drops them as soon as anybody in the batch has drafts."""
    found = faults["named"]
    assert found["lengths"] == [0, 24, 0]
    assert found["same_tokens"] and found["furthest"] < 1e-3
    assert found["accepted"] > 0


def test_invented_drafts_of_a_new_request_are_no_tokens(faults):
    """The distributions at hand are of whoever had its state before, so this runner's vLLM must
    reject such drafts without a look at them, as it does with -1."""
    assert faults["padded"] and set(faults["padded"]) == {-1}


def test_what_a_grammar_may_cut_is_handed_up_as_certain(faults):
    """The scheduler cuts a proposal at its first token that the grammar forbids: where it ends
    depends on what was drawn, and only a certain token is tested rightly then."""
    found = faults["grammar"]
    certain, free = found["probs"]  # the third is greedy
    assert len(certain) > 3 and all(p == 1 for p in certain)
    assert any(p < 0.999 for p in free), "level 2's own distribution"
    for row in (0, 2):
        assert set(found["texts"][row]) <= set(" abcdefghijklm")
