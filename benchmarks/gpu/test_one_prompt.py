"""Promise: stock vLLM and TriForce answer a prompt on this machine, eagerly and as they serve.

Weights are random: it says that engines start, capture their graphs and speculate.
"""

import pytest
import torch

from benchmarks.gpu.engines import decode, make_engine, release
from benchmarks.gpu.models import SMOKE, SMOKE_DRAFT, write_model
from vllm_triforce.metrics.report import counters_of

NUM_TOKENS = 24
FIXED = {"retrieval_budget": 256, "min_context": 0, "adaptive": False}
KEYS = {"stock": None, "fixed": FIXED, "adaptive": {"retrieval_budget": 256}}


def test_the_device_multiplies():
    from vllm.platforms import current_platform

    device = "cpu" if current_platform.is_cpu() else "cuda"
    ones = torch.ones(64, 64, device=device)
    assert float((ones @ ones).sum()) == 64**3


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "served"])
@pytest.mark.parametrize("keys", KEYS)
def test_one_prompt(tmp_path, sizes, keys, is_eager):
    triforce = KEYS[keys]
    if triforce is not None:
        triforce = {**triforce, "model": write_model(SMOKE_DRAFT, tmp_path / "draft")}
    llm = make_engine(
        write_model(SMOKE, tmp_path / "target"),
        triforce,
        sizes.is_small,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enforce_eager=is_eager,
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, SMOKE.vocab, (n,), generator=draw).tolist() for n in (700, 100)]
    answers = decode(llm, prompts, NUM_TOKENS)
    assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * 2
    if keys == "fixed":
        assert counters_of(llm).num_level2_drafted > 0
    if keys == "adaptive":
        print("seconds of passes, measured at start:", llm.collective_rpc("triforce_measured"))
    release(llm)
