"""Random streams of requests: lists of dicts that are printed, and driven, as they are."""

from hypothesis import strategies as st

from tests.fuzz.models import CHARACTERS, CORPUS_TOKENS, EOS, VOCAB_SIZE
from tests.fuzz.settings import MAX_MODEL_LEN, MAX_TOKENS, may_have_seeds

VOCAB = {"pair": 4096, "small": VOCAB_SIZE}
END = {"pair": 2, "small": EOS}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "self"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
# Strings that begin within tokens, end within them and go over several; and one that never comes.
STOPS = {
    "pair": ["self", "e", "\n", " = ", "f.", "return None", "\n    ", "never said"],
    "small": [*CHARACTERS[::5], "ab", "Z0", "kLm"],
}
REGEXES = [r"(self\._[a-z]{1,8} = [0-9]{1,3}\n){1,3}", r"[ a-m]{6,}", r"[0-9]{2,9}(, [0-9]{1,3})*"]
CHOICES = [["return self", "return None"], ["a", "ab", "abcdefgh"]]


def _once_in(draw, number: int) -> bool:
    """``st.integers`` would prefer its bounds."""
    return draw(st.sampled_from([False] * (number - 1) + [True]))


@st.composite
def streams(draw, settings: dict, runner: str = "v1", most: int | None = None) -> list[dict]:
    """2 to 10 requests; equal prompts and common beginnings among them."""
    most = most or (10 if runner == "v1" else 5)
    requests: list[dict] = []
    for _ in range(draw(st.integers(2, most))):
        requests.append(draw(_requests(settings, runner, requests)))
    return requests


@st.composite
def _requests(draw, settings: dict, runner: str, earlier: list[dict]) -> dict:
    model = settings["model"]
    if earlier and _once_in(draw, 6):
        prompt = draw(st.sampled_from(earlier))["prompt"]
    else:
        prompt = _prompt(draw, settings, runner)
    most_tokens = MAX_TOKENS if runner == "v1" else 24
    params = {"max_tokens": draw(st.integers(1, most_tokens)), "temperature": 0}
    if draw(st.booleans()):
        _sample(draw, params, settings, runner)
    elif _once_in(draw, 4):
        params["seed"] = draw(st.integers(0, 3))  # which draws nothing
    _shape(draw, params, model, runner)
    if settings["lora"]:
        # vLLM 0.32.0's CPU layers apply adapters to the logits of sampled tokens alone: stock vLLM
        # fails on a prompt's (``bgmv_shrink`` in vllm/lora/ops/torch_ops/lora_ops.py).
        params.pop("prompt_logprobs", None)
    request = {"prompt": prompt, "params": params, "arrive": 0}
    if draw(st.booleans()):
        request["arrive"] = draw(st.integers(1, 40))
    if _once_in(draw, 10):
        request["abort"] = draw(st.integers(0, 20))
    if settings["engine"]["scheduling_policy"] == "priority":
        request["priority"] = draw(st.integers(0, 2))
    if settings["lora"]:
        request["lora"] = draw(st.integers(0, 2))
    return request


def _prompt(draw, settings: dict, runner: str) -> dict:
    """Lengths of any size, or around the end of a block or of the context."""
    block_size = settings["engine"]["block_size"]
    longest = 700 if runner == "v1" else 330
    how = draw(st.sampled_from(range(10)))
    if how < 5:
        length = draw(st.integers(1, longest))
    elif how < 9 or runner != "v1":
        length = block_size * draw(st.integers(1, longest // block_size)) + draw(st.integers(-2, 2))
    else:
        length = MAX_MODEL_LEN - draw(st.integers(2, 12))
    prompt = {
        "kind": "echo" if _once_in(draw, 4) else "text",
        "start": draw(st.integers(0, CORPUS_TOKENS - MAX_MODEL_LEN)),
        "length": max(1, min(length, MAX_MODEL_LEN - 2)),
    }
    if _once_in(draw, 4):
        prompt["shared"] = draw(st.sampled_from([31, 64, 128, 300]))
    return prompt


def _sample(draw, params: dict, settings: dict, runner: str) -> None:
    params["temperature"] = draw(st.sampled_from([1.0, 0.7, 1.3, 0.4]))
    if _once_in(draw, 3):
        params["top_p"] = draw(st.sampled_from([0.95, 0.8, 0.5]))
    if _once_in(draw, 3):
        params["top_k"] = draw(st.sampled_from([50, 8, 2, 1]))
    if _once_in(draw, 5):
        params["min_p"] = draw(st.sampled_from([0.02, 0.1, 0.3]))
    if may_have_seeds(settings) and _once_in(draw, 4):
        params["seed"] = draw(st.integers(0, 2**31 - 1))
    if _once_in(draw, 4):
        params["n"] = draw(st.integers(2, 3))


def _shape(draw, params: dict, model: str, runner: str) -> None:
    """What changes logits, and what ends a request."""
    tokens = st.integers(2 if model == "small" else 3, VOCAB[model] - 1)
    if _once_in(draw, 8):
        _structure(draw, params, model, runner)
    if "structured" not in params:
        if not _once_in(draw, 3):
            params["ignore_eos"] = True
        if _once_in(draw, 8):
            params["min_tokens"] = draw(st.integers(1, params["max_tokens"]))
        if _once_in(draw, 8):
            most = 24 if model == "pair" else 4
            params["stop_token_ids"] = draw(st.lists(tokens, min_size=1, max_size=most))
        if _once_in(draw, 8):
            params["stop"] = draw(st.lists(st.sampled_from(STOPS[model]), min_size=1, max_size=3))
            if _once_in(draw, 2):
                params["include_stop_str_in_output"] = True
        if _once_in(draw, 10):
            size, count = draw(st.sampled_from([(3, 3), (1, 2), (24, 2)]))
            params["repetition"] = {
                "max_pattern_size": size,
                "min_pattern_size": 1,
                "min_count": count,
            }
        if _once_in(draw, 12):
            chosen = draw(st.lists(tokens, min_size=12, max_size=24, unique=True))
            params["allowed_token_ids"] = sorted(chosen)
    if _once_in(draw, 8):
        chosen = draw(st.lists(tokens, min_size=1, max_size=6, unique=True))
        params["logit_bias"] = [[token, draw(st.sampled_from([-100, -3, 2]))] for token in chosen]
    if _once_in(draw, 8):
        params["repetition_penalty"] = draw(st.sampled_from([1.05, 1.3]))
    if _once_in(draw, 8):
        params["presence_penalty"] = draw(st.sampled_from([0.5, 1.0]))
        params["frequency_penalty"] = draw(st.sampled_from([-0.2, 0.3]))
    if _once_in(draw, 8):
        words = st.lists(tokens, min_size=1, max_size=2)
        params["bad_words_token_ids"] = draw(st.lists(words, min_size=1, max_size=12))
    if _once_in(draw, 8):
        params["logprobs"] = draw(st.integers(0, 5))
    if _once_in(draw, 12):
        params["prompt_logprobs"] = draw(st.integers(0, 3))
    if _once_in(draw, 3):
        params["text"] = True


def _structure(draw, params: dict, model: str, runner: str) -> None:
    if runner != "v1":
        return
    if model == "small":
        # A class of characters for each place, once or more: what is allowed is known by counting.
        sizes = draw(st.lists(st.integers(2, 30), min_size=1, max_size=3))
        starts = [draw(st.integers(0, len(CHARACTERS) - size)) for size in sizes]
        classes = [CHARACTERS[start : start + size] for start, size in zip(starts, sizes)]
        params["structured"] = {"classes": classes}
        return
    params["structured"] = draw(
        st.sampled_from(
            [{"json": SCHEMA}]
            + [{"regex": regex} for regex in REGEXES]
            + [{"choice": choice} for choice in CHOICES]
        )
    )
