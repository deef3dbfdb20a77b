"""Promise: requests with images or video are answered as stock vLLM answers them, beside others.

tests/parity has greedy cases of Qwen3-VL on both runners.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from vllm import SamplingParams
from vllm.multimodal.utils import encode_image_url, encode_video_url

from tests.conftest import triforce
from tests.images import as_prompt, install, make_idefics3, make_image, make_qwen3_vl, make_video
from tests.models import PROMPTS, ROOT
from tests.outputs import assert_same_outputs, greedy, p_values, run, speculating
from tests.packages import put_project
from tests.parity.checks import LEAST_P_VALUE
from tests.serving import CHAT_TEMPLATE, MODEL, serve

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ranks_without_compiler")]

GREEDY = greedy(24)
SAMPLED = SamplingParams(temperature=1.0, top_k=4, max_tokens=40, ignore_eos=True)
ENGINE = dict(
    max_model_len=2048,
    kv_cache_memory_bytes=64 << 20,
    skip_tokenizer_init=False,
    enable_prefix_caching=True,
    limit_mm_per_prompt={"image": 2},
)
MAKERS = {"qwen3-vl": make_qwen3_vl, "idefics3": make_idefics3}


@pytest.fixture(scope="module")
def vlm(request, tmp_path_factory) -> tuple[str, list[dict]]:
    """Return a model, and prompts with one image, with two, and with none."""
    install()
    model, tokens, _ = MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "target")
    image = tokens["image"]
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
    stock = engines.get(model, None, **ENGINE)
    wanted = run(stock, prompts, [GREEDY] * 3)
    keys = triforce(retrieval_budget=128, draft_sources="prompt_lookup", levels=levels)
    llm = engines.get(model, keys, **ENGINE)
    with speculating(llm):
        found = run(llm, prompts * 5, [GREEDY] * 3 + [SAMPLED] * 12)
    assert assert_same_outputs(stock, wanted, found[:3]) == len(prompts)
    found_p_values = p_values(stock, found[3:], SAMPLED.top_k, prompts * 4)
    assert min(found_p_values) > LEAST_P_VALUE, found_p_values


HELD_OUT = (PROMPTS / "held_out.txt").read_text()
# A step has as many tokens as the largest image, so that most images are read in two steps.
SERVER = [
    *("--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
    *("--block-size", "32", "--limit-mm-per-prompt", '{"image": 2}'),
    *("--distributed-executor-backend", "uni", "--enable-per-request-metrics"),
    *("--per-request-spec-decode-metrics", "detailed", "--speculative-config"),
]


def text_part(first: int, last: int) -> dict:
    return {"type": "text", "text": HELD_OUT[first:last]}


def url_part(kind: str, url: str) -> dict:
    return {"type": kind, kind: {"url": url}}


@pytest.mark.slow
@pytest.mark.parametrize("vlm", ["qwen3-vl"], indirect=True)
def test_images_and_video_of_a_chat(engines, vlm, tmp_path):
    """A server's steps end within images; both of vLLM's caches know the second ones."""
    model, _ = vlm
    images = [make_image(seed).resize((64, 64)) for seed in (1, 2)]
    one, two = (url_part("image_url", encode_image_url(image)) for image in images)
    video = url_part("video_url", encode_video_url(make_video(3)[0]))
    first = [text_part(0, 900), one, text_part(900, 1200)]
    contents = [
        first,
        [one, text_part(0, 40), two, text_part(1200, 1500)],
        [text_part(0, 1000)],
        [text_part(0, 300), video, text_part(300, 800)],
        [video, one, text_part(800, 1100)],
        [*first[:2], text_part(1500, 1800)],
    ]
    chats = [[{"role": "user", "content": content}] for content in contents]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    stock = engines.get(model, None, **ENGINE)
    wanted = stock.chat(chats, params, use_tqdm=False, chat_template=CHAT_TEMPLATE)
    keys = json.dumps(triforce(retrieval_budget=128, draft_sources="prompt_lookup"))
    plugin = {"images": "tests.images:install"}  # for each process of the server
    project = put_project(tmp_path, "plugin", plugin, group="vllm.general_plugins")
    with serve(model, tmp_path / "log", *SERVER, keys, PYTHONPATH=f"{ROOT}:{project}") as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)

        def num_accepted(number: int, **xargs) -> int:
            own = dict(return_token_ids=True, ignore_eos=True, vllm_xargs=xargs)
            arguments = dict(temperature=0, max_tokens=40, logprobs=True, extra_body=own)
            answer = client.chat.completions.create(
                model=MODEL, messages=chats[number], **arguments
            )
            (found,), (its,) = answer.choices, wanted[number].outputs
            assert answer.prompt_token_ids == wanted[number].prompt_token_ids
            assert found.token_ids == list(its.token_ids), number
            known = [table[token].logprob for token, table in zip(its.token_ids, its.logprobs)]
            told = [place.logprob for place in found.logprobs.content]
            assert told == pytest.approx(known, abs=1e-3)
            return answer.metrics["speculative_decoding"]["num_accepted_draft_tokens"]

        with ThreadPoolExecutor() as threads:
            assert min(threads.map(num_accepted, range(5))) > 0
        assert num_accepted(0) > 0 < num_accepted(5)
        assert num_accepted(0, triforce=False) == 0
        metrics = server.metrics()
        assert metrics["vllm:prefix_cache_hits_total"] > 0 < metrics["vllm:mm_cache_hits_total"]
