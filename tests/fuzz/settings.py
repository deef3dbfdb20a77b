"""Random settings of an engine: a dict that is printed, and started, as it is."""

import importlib.util

import torch
from hypothesis import strategies as st

from tests.fuzz.models import DRAFTS, FAMILIES, NUM_GROUPS, OF_CHARACTERS, SMOLLM2
from vllm_triforce.config.level2 import _LEVEL2_KEYS
from vllm_triforce.config.triforce_config import LEVEL1_KEYS
from vllm_triforce.selection import POLICIES

HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None
SHORT = 768
# Above 4,096 tokens the default retrieval budget depends on the context.
LONG = {**dict.fromkeys(DRAFTS, 12288), "smollm2": 8192}
# Of all prompts of a stream, by ``max_model_len`` (two are the soak's): so that a stream takes a
# minute at most.
PROMPT_TOKENS = {SHORT: 10 * SHORT, 4352: 15000, 6400: 10000, 8192: 10000, 12288: 30000}
MAX_TOKENS = 48
MODELS = {
    "v1": ["small", "pair", "pair", "mimo", *FAMILIES] + ["smollm2"] * SMOLLM2.exists(),
    "v2": ["small", "pair", "small", "mimo"],
}
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
# As many tokens as may be in one step at once: no prompt is ever read in chunks.
UNCHUNKED = 32768


@st.composite
def settings(draw, runner: str = "v1", model: str | None = None, connectors: bool = False) -> dict:
    """``model``, ``engine`` (arguments of ``LLM``), ``triforce`` (its keys) and ``lora``.

    Args:
        connectors: whether half of the engines on Runner V1 have a KV connector.
    """
    model = model or draw(st.sampled_from(MODELS[runner]))
    block_size = draw(st.sampled_from([32, 32, 64, 128] if runner == "v1" else [32, 64]))
    lora = model == "pair" and draw(st.integers(0, 5)) == 0
    engine = _engine(draw, runner, model, block_size)
    if connectors and draw(st.booleans()):
        # vLLM's ExampleConnector ends a stock engine too where prompts are read in chunks.
        engine |= {"connector": True, "max_num_batched_tokens": UNCHUNKED}
    keys = _triforce(draw, runner, model, block_size, engine)
    if model == "bloom":  # in which level 2 takes no part
        keys = {name: keys[name] for name in keys if name not in (*_LEVEL2_KEYS, "levels")}
    return {"model": model, "lora": lora, "engine": engine, "triforce": keys}


def _engine(draw, runner: str, model: str, block_size: int) -> dict:
    is_long = runner == "v1" and (model == "smollm2" or draw(st.booleans()))
    max_model_len = LONG[model] if is_long else SHORT
    num_seqs = draw(st.sampled_from([2, 3, 4, 8, 16, 64] if runner == "v1" else [2, 4, 8]))
    fits_one = -(-max_model_len // block_size) + 1
    # Room for the proposals of all, too.
    roomy = -(-PROMPT_TOKENS[max_model_len] // block_size) + 8 * num_seqs + fits_one
    is_cramped = draw(st.booleans())
    # At least the null block and those of one request as long as may be.
    num_blocks = fits_one + draw(st.integers(0, 384 // block_size)) if is_cramped else roomy
    engine = {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "max_num_seqs": num_seqs,
        "num_gpu_blocks_override": num_blocks * NUM_GROUPS[model],
        # vLLM asks for room for every request's proposal.
        "max_num_batched_tokens": draw(
            st.sampled_from([*([64, 200] if num_seqs < 64 else []), 512, UNCHUNKED, UNCHUNKED])
        ),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "seed": draw(st.integers(0, 3)),
        "logprobs_mode": draw(st.sampled_from(["raw_logprobs", *LOGPROBS_MODES])),
    }
    if is_long:  # small steps would take too long, and stock's engines too much memory
        engine["max_num_batched_tokens"] = draw(st.sampled_from([512, 2048, UNCHUNKED, UNCHUNKED]))
        engine["logprobs_mode"] = "raw_logprobs"
    if model == "smollm2":
        engine["enable_prefix_caching"] = True  # prompts of one beginning are read once
    if runner == "v1":
        # Guidance does not know tokenizers of characters, and outlines ends a text where it first
        # may end, which their oracle does not know.
        backends = ("auto",) if model in OF_CHARACTERS else ("auto", "guidance", "outlines")
        engine["structured_outputs_config"] = {"backend": draw(st.sampled_from(backends))}
        if draw(st.sampled_from([False] * 9 + [True])):
            engine["enforce_eager"] = False
    if torch.cpu._is_avx512_supported() and draw(st.sampled_from([False] * 7 + [True])):
        engine["kv_cache_dtype"] = "fp8"
    # A preempted request's thinking budget begins anew in stock vLLM.
    if model == "pair" and not is_cramped and draw(st.integers(0, 3)) == 0:
        engine["reasoning"] = True
    return engine


def _triforce(draw, runner: str, model: str, block_size: int, engine: dict) -> dict:
    """The defaults in a third of the engines, fixed lengths with the default budget in another;
    what may be left out is left out at times."""
    keys: dict = {"draft": draw(st.sampled_from(DRAFTS[model]))}
    if draw(st.integers(0, 4)) == 0:
        keys["level2_model"] = "bfloat16"
    how = draw(st.sampled_from(["defaults", "default budget", "any"]))
    if how == "defaults" and runner == "v1":
        return keys
    keys["adaptive"] = False  # on V2 it would measure passes in Triton's interpreter
    if how != "any":
        return keys | {"min_context": 0}
    keys |= {
        "retrieval_budget": draw(st.sampled_from([3, 4, 6, 8])) * block_size,
        "min_context": draw(st.sampled_from([0, 0, 40, 150])),
        "num_recent_tokens": draw(st.sampled_from([20, 60, 240])),
    }
    if keys["draft"] != "head":  # whose window has no sinks
        keys["num_sink_tokens"] = draw(st.sampled_from([1, 4, 16]))
    if draw(st.integers(0, 3)):
        keys["num_speculative_tokens"] = draw(st.sampled_from([1, 2, 3, 4, 6, 9]))
    if draw(st.integers(0, 3)):
        keys["gamma"] = draw(st.sampled_from([1, 2, 3, 4]))
    if not keys["draft"]:
        if runner == "v1" and HAS_SUFFIX and draw(st.booleans()):
            keys["draft_sources"] = "suffix"
        else:
            keys["prompt_lookup_max"] = draw(st.sampled_from([1, 3, 8]))
    if draw(st.integers(0, 4)) == 0:
        keys["selection"] = draw(st.sampled_from(sorted(POLICIES)))
    # Of two levels the others' keys would be refused.
    if "level2_model" not in keys:
        others = ["1,3"] if keys["draft"] else ["1,3", "2,3"]
        keys["levels"] = draw(st.sampled_from(["1,2,3", "1,2,3", "1,2,3", *others]))
    if keys.get("levels") == "2,3":
        keys = {key: value for key, value in keys.items() if key not in LEVEL1_KEYS}
    if runner == "v1":
        keys["adaptive"] = draw(st.integers(0, 2)) == 0
        if keys["adaptive"] and draw(st.booleans()):
            del keys["min_context"]
        return keys
    if draw(st.integers(0, 2)) == 0:
        keys["max_speculating_seqs"] = draw(st.integers(1, 3))
    if draw(st.integers(0, 2)) == 0:
        keys["kv_offload_gib"] = 1.0
        # Of two or four, the first lie on the device. Not a key: engines.py
        keys["num_device_layers"] = draw(st.sampled_from([0, 0, 1]))
    return keys


def max_model_len_of(settings: dict) -> int:
    return settings["engine"].get("max_model_len", SHORT)


def may_have_seeds(settings: dict) -> bool:
    """Stock vLLM's CPU build ends on a seeded sampled prompt that is read in chunks
    (patches/README.md), also where a step's tokens are shared with others."""
    return settings["engine"]["max_num_batched_tokens"] >= UNCHUNKED


def seeds_must_hold(settings: dict) -> bool:
    """True if a seeded request must sample the same tokens beside any others.

    docs/troubleshooting.md has the exceptions: drafts that a full KV cache cuts, a head's prefix
    hits, and more requests than may speculate.
    """
    engine, keys = settings["engine"], settings["triforce"] or {}
    room = PROMPT_TOKENS[max_model_len_of(settings)] // engine["block_size"]
    return (
        may_have_seeds(settings)
        and engine["num_gpu_blocks_override"] > room * NUM_GROUPS[settings["model"]]
        and not (keys.get("draft") == "head" and engine["enable_prefix_caching"])
        and "max_speculating_seqs" not in keys
    )
