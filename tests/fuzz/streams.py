"""Random streams of requests: lists of dicts that are printed, and driven, as they are."""

import json

from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz.models import CHARACTERS, CORPUS_TOKENS, DRAFTS, EOS, OF_CHARACTERS, VOCAB_SIZE
from tests.fuzz.settings import MAX_TOKENS, PROMPT_TOKENS, SHORT, max_model_len_of, may_have_seeds
from tests.parity.cases import SCHEMA

VOCAB = {**dict.fromkeys(DRAFTS, VOCAB_SIZE), "pair": 4096, "smollm2": 49152}
END = {**dict.fromkeys(DRAFTS, EOS), "pair": 2, "smollm2": 2}
# Strings that begin within tokens, end within them and go over several; and one that never comes.
TEXT_STOPS = ["self", "e", "\n", " = ", "f.", "return None", "\n    ", "never said"]
CHARACTER_STOPS = [*CHARACTERS[::5], "ab", "Z0", "kLm"]
TAG = {
    "type": "triggered_tags",
    "triggers": ["self."],
    "tags": [
        {"begin": "self.", "content": {"type": "regex", "pattern": "_[a-z]{1,8}"}, "end": "("}
    ],
}
REGEXES = [r"(self\._[a-z]{1,8} = [0-9]{1,3}\n){1,3}", r"[ a-m]{6,}", r"[0-9]{2,9}(, [0-9]{1,3})*"]
CHOICES = [["return self", "return None"], ["a", "ab", "abcdefgh"]]


def drawn(strategy, count: int, number: tuple) -> list:
    """Draw examples of hypothesis, others by another number."""
    examples: list = []

    @seed(hash(number))
    @hypothesis_settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def note(example) -> None:
        examples.append(example)

    note()
    return examples


def _once_in(draw, number: int) -> bool:
    """``st.integers`` would prefer its bounds."""
    return draw(st.sampled_from([False] * (number - 1) + [True]))


@st.composite
def streams(draw, settings: dict, runner: str = "v1", most: int | None = None) -> list[dict]:
    """2 to 10 requests, now and then up to 64; equal prompts and common beginnings among them."""
    is_crowd = _once_in(draw, 6)
    most = most or {"v1": (10, 64), "v2": (5, 12)}[runner][is_crowd]
    # A turn comes as soon as the last one is answered, and meanwhile its session holds blocks
    # though it does not run: stock vLLM's scheduler ends at a reset ("Failed to reset KV cache").
    may_reset = draw(st.booleans())
    requests: list[dict] = []
    room = PROMPT_TOKENS[max_model_len_of(settings)] if runner == "v1" else 5 * 330
    longest = 2 * room // most if is_crowd else room
    for _ in range(draw(st.integers(most // 2 if is_crowd else 2, most))):
        request = draw(_requests(settings, runner, requests, min(room, longest), may_reset))
        room -= request["prompt"]["length"] * request["params"].get("n", 1)
        if room < 0 and len(requests) > 1:
            break
        requests.append(request)
    return requests


@st.composite
def _requests(
    draw, settings: dict, runner: str, earlier: list[dict], room: int, may_reset: bool
) -> dict:
    model = settings["model"]
    if earlier and _once_in(draw, 6):
        prompt = draw(st.sampled_from(earlier))["prompt"]
    else:
        prompt = _prompt(draw, settings, runner, room)
    most_tokens = MAX_TOKENS if runner == "v1" and model != "smollm2" else 24
    params = {"max_tokens": draw(st.integers(1, most_tokens)), "temperature": 0}
    is_long = max_model_len_of(settings) > SHORT
    if is_long:  # or few would run at the same time
        params["max_tokens"] = draw(st.integers(12, most_tokens))
    if not may_reset and runner == "v1" and _once_in(draw, 8):
        return _session(draw, prompt, params, settings)
    if draw(st.booleans()):
        _sample(draw, params, settings, runner)
    elif _once_in(draw, 4):
        params["seed"] = draw(st.integers(0, 3))  # which draws nothing
    _shape(draw, params, settings, runner)
    if prompt["length"] > 1000:  # tables of log-probabilities of a whole vocabulary
        params.pop("prompt_logprobs", None)
    if may_reset:
        # Stock vLLM counts a thinking budget anew for a request that lost its KV cache.
        params.pop("thinking_token_budget", None)
    if settings["lora"]:
        # vLLM 0.32.0's CPU layers apply adapters to the logits of sampled tokens alone: stock vLLM
        # fails on a prompt's (``bgmv_shrink`` in vllm/lora/ops/torch_ops/lora_ops.py).
        params.pop("prompt_logprobs", None)
    request = {"prompt": prompt, "params": params, "arrive": 0}
    if draw(st.booleans()):
        request["arrive"] = draw(st.integers(1, 4 if is_long else 40))
    if _once_in(draw, 10):
        request["abort"] = draw(st.integers(0, 20))
    if _once_in(draw, 20):
        request["pause"] = [draw(st.integers(0, 20)), draw(st.integers(1, 5))]
    if may_reset and _once_in(draw, 12):
        request["reset"] = draw(st.integers(1, 20))
    if settings["engine"]["scheduling_policy"] == "priority":
        request["priority"] = draw(st.integers(0, 2))
    if settings["lora"]:
        request["lora"] = draw(st.integers(0, 2))
    return request


def _session(draw, prompt: dict, params: dict, settings: dict) -> dict:
    """A greedy request with input in pieces, each sent when the last one is answered."""
    if draw(st.booleans()):
        params["ignore_eos"] = True
    if draw(st.booleans()):
        tokens = st.integers(3, VOCAB[settings["model"]] - 1)
        params["stop_token_ids"] = draw(st.lists(tokens, min_size=1, max_size=24))
    most = 300 if max_model_len_of(settings) == SHORT else 3000
    first = prompt | {"length": min(prompt["length"], most)}
    turns = [
        {"kind": "text", "start": draw(st.integers(0, 3000)), "length": draw(st.integers(2, 100))}
        for _ in range(draw(st.integers(1, 3)))
    ]
    arrive = draw(st.integers(0, 20))
    return {"prompt": first, "params": params, "arrive": arrive, "turns": turns}


def _prompt(draw, settings: dict, runner: str, room: int) -> dict:
    """Lengths of any size, or around the end of a block or of the context."""
    if max_model_len_of(settings) > SHORT:
        # Of a magnitude or as long as may be; from few places: beginnings are read once.
        longest = max_model_len_of(settings) - 2 * MAX_TOKENS
        most = max(50, min(draw(st.sampled_from([100, 600, 2000, 5000, longest])), room))
        start = 1000 * draw(st.integers(0, 1 if settings["model"] == "smollm2" else 3))
        return {"kind": "text", "start": start, "length": draw(st.integers(most // 2, most))}
    block_size = settings["engine"]["block_size"]
    # Shorter than the default budget, a context is read whole by level 2.
    has_budget = "retrieval_budget" in (settings["triforce"] or {})
    longest = 330 if runner != "v1" and has_budget else 700
    how = draw(st.sampled_from(range(10)))
    if how < 5:
        length = draw(st.integers(1, longest))
    elif how < 9 or runner != "v1":
        length = block_size * draw(st.integers(1, longest // block_size)) + draw(st.integers(-2, 2))
    else:
        length = SHORT - draw(st.integers(2, 12))
    prompt = {
        "kind": "echo" if _once_in(draw, 4) else "text",
        "start": draw(st.integers(0, CORPUS_TOKENS - SHORT)),
        # vLLM's ExampleConnector ends a stock engine too on prompts of one token.
        "length": max(1 + ("connector" in settings["engine"]), min(length, SHORT - 2, room)),
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


def _shape(draw, params: dict, settings: dict, runner: str) -> None:
    """What changes logits, and what ends a request."""
    model = settings["model"]
    tokens = st.integers(2 if model in OF_CHARACTERS else 3, VOCAB[model] - 1)
    has_budget = settings["engine"].get("reasoning") and draw(st.booleans())
    if has_budget:
        # In stock vLLM a forced token that a grammar forbids ends the request with an error, and
        # one that is not among allowed tokens comes all the same.
        params["thinking_token_budget"] = draw(st.integers(0, 30))
    elif _once_in(draw, 8):
        _structure(draw, params, settings, runner)
    if "structured" not in params:
        if not _once_in(draw, 3):
            params["ignore_eos"] = True
        if _once_in(draw, 8):
            params["min_tokens"] = draw(st.integers(1, params["max_tokens"]))
        if _once_in(draw, 8):
            most = 4 if model in OF_CHARACTERS else 24
            params["stop_token_ids"] = draw(st.lists(tokens, min_size=1, max_size=most))
        if _once_in(draw, 8):
            stops = CHARACTER_STOPS if model in OF_CHARACTERS else TEXT_STOPS
            params["stop"] = draw(st.lists(st.sampled_from(stops), min_size=1, max_size=3))
            if _once_in(draw, 2):
                params["include_stop_str_in_output"] = True
        if _once_in(draw, 10):
            size, count = draw(st.sampled_from([(3, 3), (1, 2), (24, 2)]))
            params["repetition"] = {
                "max_pattern_size": size,
                "min_pattern_size": 1,
                "min_count": count,
            }
        if _once_in(draw, 12) and not has_budget:
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


def _structure(draw, params: dict, settings: dict, runner: str) -> None:
    if runner != "v1":
        return
    if settings["model"] in OF_CHARACTERS:
        # A class of characters for each place, once or more: what is allowed is known by counting.
        sizes = draw(st.lists(st.integers(2, 30), min_size=1, max_size=3))
        starts = [draw(st.integers(0, len(CHARACTERS) - size)) for size in sizes]
        classes = [CHARACTERS[start : start + size] for start, size in zip(starts, sizes)]
        params["structured"] = {"classes": classes}
        return
    kinds = [{"json": SCHEMA}]
    kinds += [{"regex": regex} for regex in REGEXES]
    kinds += [{"choice": choice} for choice in CHOICES]
    if settings["engine"]["structured_outputs_config"]["backend"] == "auto":  # not all have tags
        tags = json.dumps({"type": "structural_tag", "format": TAG})
        kinds += [{"structural_tag": tags}] * 3
    params["structured"] = draw(st.sampled_from(kinds))
