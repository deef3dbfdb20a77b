"""Promise: requests with images are answered as stock vLLM answers them, beside others without.

tests/parity has greedy cases of Qwen3-VL on both runners.
"""

import random

import pytest
from vllm import SamplingParams

from tests.conftest import triforce
from tests.images import as_prompt, install, make_idefics3, make_qwen3_vl
from tests.outputs import assert_same_outputs, greedy, p_values, run, speculating
from tests.parity.checks import LEAST_P_VALUE

pytestmark = pytest.mark.engine

GREEDY = greedy(24)
SAMPLED = SamplingParams(temperature=1.0, top_k=4, max_tokens=40, ignore_eos=True)
ENGINE = dict(
    max_model_len=2048,
    kv_cache_memory_bytes=64 << 20,
    skip_tokenizer_init=False,
    enable_prefix_caching=True,
    limit_mm_per_prompt={"image": 2, "video": 0},
)
MAKERS = {"qwen3-vl": make_qwen3_vl, "idefics3": make_idefics3}


@pytest.fixture(scope="module", autouse=True)
def _without_compiler(ranks_without_compiler):
    """Leave ranks uncompiled."""


@pytest.fixture(scope="module")
def vlm(request, tmp_path_factory) -> tuple[str, list[dict]]:
    """Return a model, and prompts with one image, with two, and with none."""
    install()
    model, image, _ = MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "target")
    draw = random.Random(0)
    text = [draw.randrange(2, 2000) for _ in range(600)]
    prompts = [
        as_prompt([*text[:200], *image, *text[200:260]], (1,)),
        as_prompt([*image, *text[300:330], *image, *text[300:330]], (2, 3)),
        as_prompt(text[:400], ()),
    ]
    return model, prompts


@pytest.mark.parametrize(
    "vlm, levels",
    [("qwen3-vl", "1,2,3"), ("qwen3-vl", "1,3"), ("idefics3", "1,2,3")],
    indirect=["vlm"],
)
def test_images(engines, vlm, levels):
    """Greedy and sampled requests in one batch, by level 2 and straight to the full pass."""
    model, prompts = vlm
    video = {} if "qwen" in model else {"limit_mm_per_prompt": {"image": 2}}
    stock = engines.get(model, None, **ENGINE | video)
    wanted = run(stock, prompts, [GREEDY] * 3)
    keys = triforce(retrieval_budget=128, draft_sources="prompt_lookup", levels=levels)
    llm = engines.get(model, keys, **ENGINE | video)
    with speculating(llm):
        found = run(llm, prompts * 5, [GREEDY] * 3 + [SAMPLED] * 12)
    assert assert_same_outputs(stock, wanted, found[:3]) == len(prompts)
    found_p_values = p_values(stock, found[3:], SAMPLED.top_k, prompts * 4)
    assert min(found_p_values) > LEAST_P_VALUE, found_p_values
