"""Promise: whatever the target's layers are, output is stock vLLM's and level 2 is the target over
what it reads.

Random models of a few layers (``tests/models.py``, ``tests/families.py``).
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.conftest import triforce
from tests.families import FAMILIES, make_family
from tests.inside import built, worker_of
from tests.models import ARCHITECTURES, make_architecture
from tests.outputs import assert_same_outputs, p_values, run, speculating
from tests.parity.checks import LEAST_P_VALUE
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

# Of random tokens, without a tokenizer.
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=1.0, top_k=4, max_tokens=40, ignore_eos=True, detokenize=False)
# One of each kind of attention; the rest with level 2 on the CPU differ in what surrounds it.
SHORT = ["mixtral", "gemma3", "gemma4", "gemma4-shared", "gpt-oss", "mimo-v2", "step3p5"]
GPUS_ALONE = {"deepseek-v2", "granite-hybrid", "nemotron-h", "qwen3.5"}
LONG = sorted((ARCHITECTURES | FAMILIES).keys() - {*SHORT, "bloom", *GPUS_ALONE})
ENGINE = dict(max_model_len=2048, kv_cache_memory_bytes=64 << 20)


@pytest.fixture(scope="module", autouse=True)
def short_start():
    """Start engines without compiler, which takes a minute for some models."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.thorough) for name in LONG)]
)
def test_architecture(engines, tmp_path, name):
    """Level 2 with a small budget is tested and rejected by level 3 and the output is stock's;
    with a budget that covers everything, level 2 is the target, so nothing is rejected."""
    make = make_family if name in FAMILIES else make_architecture
    model = make(tmp_path / name, name)
    keys = json.loads(Path(model, "config.json").read_text())
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 4096) for _ in range(n)] for n in (500, 120, 260)]
    params = [GREEDY] * 3
    stock = engines.get(model, None, **ENGINE)
    wanted = run(stock, prompts, params)
    assert len(set(wanted[0].outputs[0].token_ids)) > 15, "too dull a model to test anything"

    llm = engines.get(model, triforce(retrieval_budget=128), **ENGINE)
    with speculating(llm):
        # Greedy and sampled requests in one batch.
        found = run(llm, [*prompts, *prompts, *prompts], params + [SAMPLED] * 6)
    assert assert_same_outputs(stock, wanted, found[:3]) == len(prompts)
    found_p_values = p_values(stock, found[3:], SAMPLED.top_k)
    assert min(found_p_values) > LEAST_P_VALUE, found_p_values
    level2 = built(llm).speculator.level2
    num_layers = len(worker_of(llm).triforce.target_layers)
    assert num_layers - len(level2.attention.layers) == _num_dense(keys)

    if name in ("mixtral", "gpt-oss"):  # whose experts and rotations level 2's copy has for itself
        copy = triforce(retrieval_budget=128, level2_model="bfloat16")
        copied = engines.get(model, copy, **ENGINE)
        with speculating(copied):
            found = run(copied, prompts, params)
        assert assert_same_outputs(stock, wanted, found) == len(prompts)
        weights = built(copied).speculator.level2.model.named_parameters()
        assert {w.dtype for named, w in weights if "expert" in named} == {torch.bfloat16}

    cache = level2.cache
    budget, cache.budget = cache.budget, replace(cache.budget, min_blocks=64, max_blocks=64)
    before = counters_of(llm)
    assert_same_outputs(stock, wanted, run(llm, prompts, params))
    cache.budget = budget
    counted = counters_of(llm).since(before)
    assert counted.num_level2_accepted == counted.num_level2_drafted > 50


def _num_dense(keys: dict) -> int:
    """Count layers with a window, or with another layer's keys, in a model's config."""
    kinds = keys.get("layer_types") or ["full_attention"] * keys["num_hidden_layers"]
    shared = kinds[len(kinds) - keys.get("num_kv_shared_layers", 0) :]
    return kinds.count("sliding_attention") + shared.count("full_attention")
