"""The models of the matrix, with a text each."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import joint
from tests.families import make_family
from tests.images import make_qwen3_vl
from tests.models import (
    PAIR,
    held_out_tokens,
    make_adapter,
    make_architecture,
    make_head,
    make_int8,
    make_llama,
    make_mimo,
)


@dataclass(frozen=True)
class Model:
    target: str
    draft: str
    text: list[int]
    """Tokens that a case's prompts are stretches of."""
    has_tokenizer: bool = False
    adapters: tuple[str, ...] = ()
    """Folders of LoRA adapters, numbered from 1."""
    level2_models: Mapping[str, str] = field(default_factory=dict)
    """Checkpoints of the target's shape, by name."""
    head: str = ""
    """An EAGLE-3 head, or a model with MTP layers."""
    image_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tokens of an ``image`` and of a ``video`` in a prompt."""


def make_models(folder: Path, gqa: dict[str, str]) -> dict[str, Model]:
    """
    Args:
        folder: where those that are not there yet are made.
        gqa: target and draft with grouped queries.
    """
    pair = str(PAIR / "target"), str(PAIR / "draft")
    # Peaked, so that a few hundred samples say something.
    of_eight_shape = dict(vocab_size=8, num_kv_heads=2, std=0.25, query_scale=1.5)
    eight = make_llama(folder / "eight", **of_eight_shape)
    random_of_eight = make_llama(folder / "random8", **of_eight_shape, seed=5)
    draft_of_eight = make_llama(folder / "draft8", vocab_size=8, num_layers=1, std=0.1, seed=1)
    mimo = make_mimo(folder / "mimo", **of_eight_shape)
    twelve = joint.make_models(folder)
    gemma3 = make_architecture(folder / "gemma3", "gemma3")
    granite = make_architecture(folder / "granite", "granite-windows")
    bloom = make_architecture(folder / "bloom", "bloom")
    windows = make_architecture(
        folder / "windows", "mistral", vocab_size=8, sliding_window=64, initializer_range=0.25
    )
    heads = dict(num_key_value_heads=4, num_global_key_value_heads=1, attention_k_eq_v=True)
    gemma4 = make_architecture(folder / "gemma4", "gemma4-shared", **heads)
    mimo_v2 = make_family(folder / "mimo-v2", "mimo-v2")
    head_of_pair = make_head(folder / "head", pair[0], draft_vocab=2048, layers=(1, 2, 3))
    # In the order of reading, the state before the first layer is the embedding.
    head_of_eight = make_head(folder / "head8", eight, draft_vocab=4, layers=(0, 1, 2))
    of_pair, of_eight = (
        tuple(
            make_adapter(folder / f"adapter-{i}-of-{name}", target, seed=i, **how) for i in (1, 2)
        )
        for name, target, how in (("pair", pair[0], {}), ("eight", eight, {"with_head": True}))
    )
    qwen3_vl, image_tokens, vocab_size = make_qwen3_vl(folder / "qwen3-vl")
    draft_of_qwen = make_llama(folder / "draft-vl", vocab_size=vocab_size, num_layers=1, seed=1)
    return {
        "qwen3-vl": Model(
            qwen3_vl,
            draft_of_qwen,
            _random(2000),
            has_tokenizer=True,
            image_tokens=image_tokens,
            head=make_head(folder / "head-vl", qwen3_vl, draft_vocab=2048, layers=(1, 2, 3)),
        ),
        "pair": Model(
            *pair,
            held_out_tokens(16000),
            has_tokenizer=True,
            adapters=of_pair,
            level2_models={"int8": make_int8(folder / "int8", pair[0])},
            head=head_of_pair,
        ),
        "gqa": Model(gqa["target"], gqa["draft"], _random(4096)),
        "gemma3": Model(gemma3, "", _random(4000)),
        "bloom": Model(bloom, "", _random(4000)),
        "windows": Model(windows, "", _random(8, least=0)),
        "gemma4": Model(gemma4, "", _random(4000)),
        "mimo-v2": Model(mimo_v2, "", _random(4000)),
        "granite-windows": Model(granite, "", _random(4000)),
        "eight": Model(
            eight,
            draft_of_eight,
            _random(8, least=0),
            adapters=of_eight,
            level2_models={"random": random_of_eight},
            head=head_of_eight,
        ),
        "mimo": Model(mimo, "", _random(8, least=0), head=mimo),
        "twelve": Model(twelve["target"], twelve["draft"], joint.make_prompt()),
    }


def _random(vocab_size: int, least: int = 3) -> list[int]:
    draw = random.Random(vocab_size)
    return [draw.randrange(least, vocab_size) for _ in range(16000)]
