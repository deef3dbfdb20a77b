"""Promise: under every setting of the engine that is not refused, the output is stock vLLM's.

Tensor and data parallelism start processes and take minutes on two cores: they run with
``TRIFORCE_TEST_PARALLEL=1`` (``tests/engine/parallel_case.py``).
"""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from tests import child
from tests.conftest import triforce
from tests.engine.parallel_case import IN_HOST_MEMORY, KEYS, prompts
from tests.generation import assert_same_tokens
from tests.inside import controller_of
from tests.models import make_architecture, make_int8
from tests.outputs import assert_same_outputs, greedy, run, speculating
from tests.v2.environment import needs_interpreter, v2_environment
from vllm_triforce.metrics.report import counters_of

pytestmark = pytest.mark.engine

GREEDY = greedy(30)
# Of random tokens, without a tokenizer.
TOKENS_ONLY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("name", ["bfloat16", pytest.param("int8", marks=pytest.mark.thorough)])
def test_a_copy_takes_what_the_doctor_says(pair, tmp_path, name):
    """Within 2 %. Some CPUs' kernels hide packed weights: those of the checkpoint count."""
    copy = make_int8(tmp_path / name, pair["target"]) if name == "int8" else name
    keys = triforce(retrieval_budget=256, level2_model=copy)
    options = ["--dtype", "float32", "--speculative-config", json.dumps(keys)]
    # In a process of its own: vLLM keeps the rotary embeddings that the doctor builds without data.
    command = [sys.executable, "-m", "vllm_triforce.cli", "doctor", pair["target"], *options]
    said = json.loads(child.run(*command, "--json", "--machine", "H200").stdout)["memory"][
        "level2_model_bytes"
    ]
    parts = load_file(f"{copy if name == 'int8' else pair['target']}/model.safetensors").values()
    assert name == "int8" or {part.dtype for part in parts} == {torch.bfloat16}
    assert sum(part.nbytes for part in parts) == pytest.approx(said, rel=0.02)


def test_passes_are_measured_beside_adapters(engines, pair):
    """Before vLLM's layers were told of any token; level 2's copy has no adapters."""
    keys = triforce(adaptive=True, level2_model="bfloat16")
    llm = engines.get(pair["target"], keys, enable_lora=True, max_lora_rank=8)
    assert controller_of(llm).measured is not None


# Largest distance of stock's two best log-probabilities where the outputs may part: a full pass
# over seven tokens rounds differently from one over a single token.
NUMBERS = {
    "fp8": (dict(kv_cache_dtype="fp8"), 0.05),
    "fp8_e5m2": (dict(kv_cache_dtype="fp8_e5m2"), 0.05),
    "bfloat16": (dict(dtype="bfloat16"), 0.15),
    "bfloat16 and fp8": (dict(dtype="bfloat16", kv_cache_dtype="fp8"), 0.15),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_of_fewer_bits(engines, pair, text, case):
    """Greedy output parts from stock's only where rounding decides, and rarely."""
    arguments, noise = NUMBERS[case]
    if "kv_cache_dtype" in arguments and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU build has fp8 KV caches with AVX-512 only")
    stock = engines.get(pair["target"], None, **arguments)
    llm = engines.get(pair["target"], triforce(retrieval_budget=256), **arguments)
    prompts = [text[:900], text[1000:1700], text[2000:2400], text[2500:2600]]
    wanted = run(stock, prompts, [GREEDY] * 4)
    with speculating(llm, rejections=False):
        found = run(llm, prompts, [GREEDY] * 4)
    identical = sum(
        assert_same_tokens(
            stock, prompt, list(w.outputs[0].token_ids), list(f.outputs[0].token_ids), noise
        )
        for prompt, w, f in zip(prompts, wanted, found)
    )
    assert identical >= 3
    # Level 2 read the right keys and values, or nearly nothing would be accepted.
    assert counters_of(llm).level2_acceptance_rate > 0.5


# A context of four times what the target was made for, and some: frequencies that YaRN changes.
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN["original_max_position_embeddings"] = 1024


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["int8 target", "int8 draft", "yarn"])
def test_other_weights_and_positions(engines, pair, text, tmp_path, case):
    """Targets and drafts of 8 bits, and positions that ``hf_overrides`` changes."""
    target, draft = pair["target"], pair["draft"]
    arguments, noise = {}, 2e-4
    if case == "int8 target":
        # Numbers that lie near the middle of two steps are rounded up or down.
        target, noise = make_int8(tmp_path / "target", target), 0.15
        arguments["skip_tokenizer_init"] = True
    elif case == "int8 draft":
        draft = make_int8(tmp_path / "draft", draft)
    else:
        arguments["hf_overrides"] = {"rope_parameters": YARN}
    params = [TOKENS_ONLY] * 3
    prompts = [text[:900], text[1000:3000], text[2500:2600]]
    stock = engines.get(target, None, max_model_len=4096, **arguments)
    wanted = run(stock, prompts, params)
    if case == "yarn":
        plain = run(engines.get(target, None, max_model_len=4096), prompts, params)
        assert wanted[1].outputs[0].token_ids != plain[1].outputs[0].token_ids
    keys = triforce(model=draft, retrieval_budget=256)
    llm = engines.get(target, keys, max_model_len=4096, **arguments)
    before = counters_of(llm)
    with speculating(llm, rejections=False):
        found = run(llm, prompts, params)
    for prompt, w, f in zip(prompts, wanted, found):
        ids = list(w.outputs[0].token_ids), list(f.outputs[0].token_ids)
        assert_same_tokens(stock, prompt, *ids, noise)
    counted = counters_of(llm).since(before)
    assert counted.level2_acceptance_rate > 0.5
    assert counted.level1_acceptance_rate > (0.05 if case == "yarn" else 0.2), counted


def test_without_prefix_caching_nor_hybrid_cache_manager_and_async_asked_for(
    engines, tmp_path, pair, text
):
    """An asynchronous scheduler is switched off by vLLM itself on the CPU. Logits are asked for in
    the place of log-probabilities, behind what changes them."""
    arguments = dict(
        enable_prefix_caching=False, async_scheduling=True, logprobs_mode="processed_logits"
    )
    stock = engines.get(pair["target"], None, **arguments)
    llm = engines.get(pair["target"], triforce(retrieval_budget=256), **arguments)
    assert not llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    prompts = [text[:900], text[:950], text[400:900]]
    one_answer = dict(temperature=1.0, top_k=1, max_tokens=30, logprobs=0)
    params = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=30, logprobs=2, repetition_penalty=1.2),
        SamplingParams(**one_answer),
    ]
    with speculating(llm):
        found = run(llm, prompts, params)
    assert assert_same_outputs(stock, run(stock, prompts, params), found) == 3
    assert [o.num_cached_tokens for o in found] == [0, 0, 0]

    model = make_architecture(tmp_path / "gemma3", "gemma3")
    arguments = dict(disable_hybrid_kv_cache_manager=True, max_model_len=2048)
    params = [TOKENS_ONLY]
    stock = engines.get(model, None, **arguments)
    llm = engines.get(model, triforce(retrieval_budget=128), **arguments)
    with speculating(llm):
        found = run(llm, [text[:500]], params)
    assert assert_same_outputs(stock, run(stock, [text[:500]], params), found) == 1


@pytest.mark.slow
@pytest.mark.skipif("TRIFORCE_TEST_PARALLEL" not in os.environ, reason="takes minutes")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[needs_interpreter] * (case in IN_HOST_MEMORY)) for case in KEYS],
)
def test_parallel(engines, pair, case):
    """Real processes through AsyncLLM. All ranks of a tensor-parallel target must propose the
    same: their counters are alike, also where each has its own heads' KV in its own host memory.
    Data-parallel engines answer each on its own."""
    pytest.importorskip({"ray": "ray", "suffix": "arctic_inference"}.get(case, "vllm"))
    env = v2_environment() if case in IN_HOST_MEMORY else None
    results = child.results_of("tests.engine.parallel_case", case, env=env)
    stock, asked = engines.get(pair["target"]), prompts()
    for prompt, w, found in zip(asked, run(stock, asked, [GREEDY] * 4), results["tokens"]):
        assert_same_tokens(stock, prompt, list(w.outputs[0].token_ids)[: len(found)], found)
    counters = results["counters"]
    assert len(counters) == 2
    for rank in counters:
        assert (rank["num_level2_accepted"] > 0) == ("plain" not in case)
        rank.pop("time_seconds", None)
        if case in IN_HOST_MEMORY:
            assert rank["num_staged_bytes"] > 0
            assert (rank["num_pool_blocks"] > 0) == ("plain" not in case)
            # Which chunks are in the pool already depends on a rank's own heads.
            del rank["num_pool_hits"], rank["num_pool_bytes"]
    if case != "data":
        assert counters[0] == counters[1]
