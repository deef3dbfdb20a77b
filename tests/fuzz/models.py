"""The fuzzer's models and prompts for them.

``pair`` is the embedded one: real text, real acceptance. ``small`` is random with a vocabulary of
one token per character, so that what should come out is cheap to know, grammars included; ``mimo``
is like it and has an MTP layer; ``FAMILIES`` are like it, of other families.
``smollm2`` is the pretrained one, where it has been made.
"""

import functools
import pydoc_data.topics
import random
import string
import tempfile
from pathlib import Path

from tests.families import make_family
from tests.models import (
    PAIR,
    ROOT,
    held_out_tokens,
    make_adapter,
    make_architecture,
    make_head,
    make_llama,
    make_mimo,
)

BOS, EOS = 0, 1
CHARACTERS = string.ascii_letters + string.digits
VOCAB_SIZE = 2 + len(CHARACTERS)
SMOLLM2 = ROOT / "build" / "smollm2" / "gqa"
# Norms of queries and keys, experts, ALiBi; layers with windows beside others, heads of two sizes,
# KV of other layers, sinks in all layers or in windows.
WITH_WINDOWS = ("gemma3", "gemma4-shared", "gpt-oss", "mimo-v2")
FAMILIES = ("qwen3", "glm4-moe", "bloom", *WITH_WINDOWS)
# Where drafts come from; None is prompt lookup.
DRAFTS = {
    **dict.fromkeys(FAMILIES, (None, "model")),
    "pair": (None, "model", "head"),
    "small": (None, "model", "head"),
    "qwen3": (None, "model", "head"),
    "mimo": (None, "head"),
    "smollm2": (None, "head"),
}
OF_CHARACTERS = DRAFTS.keys() - {"pair", "smollm2"}
# In each KV cache group a request has blocks.
NUM_GROUPS = {**dict.fromkeys(DRAFTS, 1), **dict.fromkeys(WITH_WINDOWS, 2)}
# Prompts are cut from so many tokens, the same in every run.
CORPUS_TOKENS = 16000
ECHO_TOKENS = 23


@functools.cache
def scratch() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="fuzz-models-")
    scratch.holder = holder  # removed when the process ends
    return Path(holder.name)


@functools.cache
def target_of(model: str) -> str:
    if model == "pair":
        return str(PAIR / "target")
    if model == "smollm2":
        return str(SMOLLM2)
    shape = dict(vocab_size=VOCAB_SIZE, num_kv_heads=2, std=0.11, query_scale=2.5, seed=3)
    if model == "mimo-v2":
        target = make_family(scratch() / model, model, vocab_size=VOCAB_SIZE)
    elif model in FAMILIES:
        size = dict(vocab_size=VOCAB_SIZE, max_position_embeddings=16384)
        target = make_architecture(scratch() / model, model, **size)
    elif model == "mimo":
        target = make_mimo(scratch() / model, **shape)
    else:
        target = make_llama(scratch() / model, num_heads=4, **shape)
    save_tokenizer(target)
    return target


@functools.cache
def draft_of(model: str, kind: str) -> str:
    """A draft ``model``, or a ``head``: an EAGLE-3 head, or a target with an MTP layer."""
    if kind == "head":
        if model == "smollm2":
            return str(ROOT / "examples" / "models" / "smollm2_head")
        if model == "mimo":
            return target_of(model)
        half = 2048 if model == "pair" else VOCAB_SIZE // 2
        layers = (0, 1, 2) if model == "small" else (1, 2, 3)
        kinds = dict(layers=layers, layer_types=["full_attention"])
        return make_head(scratch() / f"head-{model}", target_of(model), draft_vocab=half, **kinds)
    if model == "pair":
        return str(PAIR / "draft")
    # The first layers of the others are no models of transformers' or vLLM's.
    cut = model if model in ("qwen3", "gemma3", "gpt-oss") else "small"
    return _first_layer_of(target_of(cut), scratch() / f"draft-of-{model}")


def _first_layer_of(target: str, folder: Path) -> str:
    """A draft that agrees with the target now and then."""
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(target)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    if kinds := getattr(draft.config, "layer_types", None):
        draft.config.layer_types = kinds[:1]
    draft.save_pretrained(folder)
    return str(folder)


@functools.cache
def adapter_of(model: str, number: int) -> str:
    """Adapters are numbered from 1."""
    return make_adapter(scratch() / f"adapter-{model}-{number}", target_of(model), seed=number)


def save_tokenizer(folder: str, characters: str = CHARACTERS) -> None:
    """Save a tokenizer with a token for each character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": BOS, "</s>": EOS} | {c: 2 + i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@functools.cache
def corpus(model: str) -> list[int]:
    if model == "pair":
        return held_out_tokens(CORPUS_TOKENS)
    if model == "smollm2":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target_of(model))
        text = "\n\n".join(pydoc_data.topics.topics.values())
        return tokenizer(text)["input_ids"][:CORPUS_TOKENS]
    draw = random.Random(0)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(CORPUS_TOKENS)]


def tokens_of(model: str, prompt: dict) -> list[int]:
    """A prompt's tokens.

    Args:
        prompt: ``length`` tokens of the corpus from ``start``, or of ``kind`` "echo": a few tokens
            said again and again; the first ``shared`` tokens are those of the corpus.
    """
    text, start, length = corpus(model), prompt["start"], prompt["length"]
    if prompt["kind"] == "echo":
        some = text[start : start + ECHO_TOKENS]
        tokens = (some * (length // ECHO_TOKENS + 1))[:length]
    else:
        tokens = text[start : start + length]
    shared = min(prompt.get("shared", 0), length)
    return text[:shared] + tokens[shared:]


def token_of_character(character: str) -> int:
    return 2 + CHARACTERS.index(character)
