"""Promise: over two ranks, each of which has its own heads' KV in its own host memory, answers are
stock vLLM's, and the ranks draw and propose alike.

Real processes, each with Triton's interpreter, take minutes on two cores: they run with
``TRIFORCE_TEST_PARALLEL=1``.
"""

import json
import os

import pytest

from tests.child import results_of
from tests.generation import assert_same_tokens, generate
from tests.models import held_out_tokens
from tests.v2.environment import needs_interpreter, v2_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    needs_interpreter,
    pytest.mark.skipif("TRIFORCE_TEST_PARALLEL" not in os.environ, reason="takes minutes"),
]

KEYS = dict(method="triforce", kv_offload_gib=0.06)
SPECULATING = dict(min_context=200, adaptive=False, retrieval_budget=128, num_recent_tokens=100)


@pytest.fixture(scope="module")
def stock(engines, pair):
    return engines.get(pair["target"])


@pytest.mark.parametrize("how", ["speculating", "plain"])
def test_two_ranks(stock, pair, tmp_path, how):
    keys = {"speculating": {**SPECULATING, "model": pair["draft"]}, "plain": {"levels": "3"}}[how]
    text = held_out_tokens(4000)
    prompts = [text[:520], text[600:690], text[100:420], text[1000:1400]]
    params = [dict(temperature=t, max_tokens=14, ignore_eos=True) for t in (0, 0, 0, 1.0)]
    asked = tmp_path / "asked.json"
    requests = list(zip(prompts, params))
    asked.write_text(
        json.dumps({"target": pair["target"], "keys": KEYS | keys, "requests": requests})
    )
    found = results_of("tests.v2.tensor_parallel_case", str(asked), env=v2_environment())
    wanted = generate(stock, prompts[:3], max_tokens=14)
    for prompt, w, its in zip(prompts, wanted, found["tokens"]):
        assert_same_tokens(stock, prompt, w, its)
    one, other = found["counters"]
    for counters in (one, other):
        counters.pop("time_seconds")
    assert one == other
    assert one["num_staged_bytes"] > 0
    assert (one["num_level2_accepted"] > 0) == (one["num_pool_blocks"] > 0) == (how != "plain")
