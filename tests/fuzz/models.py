"""The fuzzer's two pairs of models and prompts for them.

``pair`` is the embedded one: real text, real acceptance. ``small`` is random with a vocabulary of
one token per character, so that what should come out is cheap to know, grammars included.
"""

import functools
import random
import string
import tempfile
from pathlib import Path

from tests.models import PAIR, held_out_tokens, make_adapter, make_llama

BOS, EOS = 0, 1
CHARACTERS = string.ascii_letters + string.digits
VOCAB_SIZE = 2 + len(CHARACTERS)
MODELS = ("pair", "small")
# Prompts are cut from so many tokens, the same in every run.
CORPUS_TOKENS = 8000
ECHO_TOKENS = 23


@functools.cache
def _folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="fuzz-models-")
    _folder.holder = holder  # removed when the process ends
    return Path(holder.name)


@functools.cache
def target_of(model: str) -> str:
    if model == "pair":
        return str(PAIR / "target")
    target = make_llama(
        _folder() / "target",
        vocab_size=VOCAB_SIZE,
        num_heads=4,
        num_kv_heads=2,
        std=0.11,
        query_scale=2.5,
        seed=3,
    )
    _save_tokenizer(target)
    return target


@functools.cache
def draft_of(model: str) -> str:
    if model == "pair":
        return str(PAIR / "draft")
    return _first_layer_of(target_of(model), _folder() / "draft")


def _first_layer_of(target: str, folder: Path) -> str:
    """A draft that agrees with the target now and then."""
    from transformers import LlamaForCausalLM

    draft = LlamaForCausalLM.from_pretrained(target)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    draft.save_pretrained(folder)
    return str(folder)


@functools.cache
def adapter_of(model: str, number: int) -> str:
    """Adapters are numbered from 1."""
    return make_adapter(_folder() / f"adapter-{model}-{number}", target_of(model), seed=number)


def _save_tokenizer(folder: str) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": BOS, "</s>": EOS} | {c: 2 + i for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@functools.cache
def corpus(model: str) -> list[int]:
    if model == "pair":
        from transformers import AutoTokenizer

        return held_out_tokens(AutoTokenizer.from_pretrained(target_of(model)), CORPUS_TOKENS)
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
