"""Random settings of an engine: a dict that is printed, and started, as it is."""

from hypothesis import strategies as st

from vllm_triforce.config.triforce_config import LEVEL1_KEYS
from vllm_triforce.selection import POLICIES

MAX_MODEL_LEN = 768
MAX_TOKENS = 48
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
# Guidance does not know the tokenizer of "small", and outlines ends a text where it first may end,
# which its oracle does not know.
BACKENDS = {"pair": ("auto", "guidance", "outlines"), "small": ("auto",)}
# As many tokens as may be in one step at once: no prompt is ever read in chunks.
UNCHUNKED = 8192


@st.composite
def settings(draw, runner: str = "v1", model: str | None = None) -> dict:
    """``model``, ``engine`` (arguments of ``LLM``), ``triforce`` (its keys) and ``lora``."""
    model = model or draw(st.sampled_from(["small", "pair", "small"]))
    block_size = draw(st.sampled_from([32, 32, 64, 128] if runner == "v1" else [32, 64]))
    lora = model == "pair" and draw(st.integers(0, 5)) == 0
    return {
        "model": model,
        "lora": lora,
        "engine": _engine(draw, runner, model, block_size),
        "triforce": _triforce(draw, runner, block_size),
    }


def _engine(draw, runner: str, model: str, block_size: int) -> dict:
    num_seqs = draw(st.sampled_from([2, 3, 4, 8] if runner == "v1" else [2, 4]))
    fits_one = -(-MAX_MODEL_LEN // block_size) + 1
    roomy = fits_one * (num_seqs + 1)
    is_cramped = draw(st.booleans())
    # At least the null block and those of one request as long as may be.
    num_blocks = fits_one + draw(st.integers(0, 384 // block_size)) if is_cramped else roomy
    engine = {
        "block_size": block_size,
        "max_num_seqs": num_seqs,
        "num_gpu_blocks_override": num_blocks,
        "max_num_batched_tokens": draw(st.sampled_from([64, 200, 512, UNCHUNKED, UNCHUNKED])),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "seed": draw(st.integers(0, 3)),
        "logprobs_mode": draw(st.sampled_from(["raw_logprobs", *LOGPROBS_MODES])),
    }
    if runner == "v1":
        engine["structured_outputs_config"] = {"backend": draw(st.sampled_from(BACKENDS[model]))}
        if draw(st.sampled_from([False] * 19 + [True])):
            engine["enforce_eager"] = False
    return engine


def _triforce(draw, runner: str, block_size: int) -> dict:
    """What may be left out is left out at times."""
    keys = {
        "retrieval_budget": draw(st.sampled_from([3, 4, 6, 8])) * block_size,
        "min_context": draw(st.sampled_from([0, 0, 40, 150])),
        "num_sink_tokens": draw(st.sampled_from([1, 4, 16])),
        "num_recent_tokens": draw(st.sampled_from([20, 60, 240])),
        "refresh_interval": draw(st.sampled_from([0, 0, 3, 8] if runner == "v1" else [0, 3, 8, 8])),
    }
    keys["with_draft"] = draw(st.booleans())
    if draw(st.integers(0, 3)):
        keys["num_speculative_tokens"] = draw(st.sampled_from([1, 2, 3, 4, 6, 9]))
    if draw(st.integers(0, 3)):
        keys["gamma"] = draw(st.sampled_from([1, 2, 3, 4]))
    if not keys["with_draft"]:
        keys["prompt_lookup_max"] = draw(st.sampled_from([1, 3, 8]))
    if draw(st.integers(0, 4)) == 0:
        keys["selection"] = draw(st.sampled_from(sorted(POLICIES)))
    keys["levels"] = draw(st.sampled_from(["1,2,3", "1,2,3", "1,2,3", "1,3", "2,3"]))
    if keys["levels"] == "2,3":  # keys of drafts are refused
        keys = {key: keys[key] for key in keys if key not in LEVEL1_KEYS} | {"with_draft": False}
    keys["adaptive"] = False  # on V2 it would measure passes in Triton's interpreter
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
    if "kv_offload_gib" in keys or keys.get("selection", "retrieval") != "retrieval":
        keys["refresh_interval"] = keys["refresh_interval"] or 1  # passes cannot select there
    return keys


def may_have_seeds(settings: dict) -> bool:
    """Stock vLLM's CPU build ends on a seeded sampled prompt that is read in chunks
    (patches/README.md), also where a step's tokens are shared with others."""
    return settings["engine"]["max_num_batched_tokens"] >= UNCHUNKED
