"""The models of the matrix, with a text each."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from tests import joint
from tests.models import PAIR, held_out_tokens, make_architecture, make_llama


@dataclass(frozen=True)
class Model:
    target: str
    draft: str
    text: list[int]
    """Tokens that a case's prompts are stretches of."""
    has_tokenizer: bool = False


def make_models(folder: Path, gqa: dict[str, str]) -> dict[str, Model]:
    """
    Args:
        folder: where those that are not there yet are made.
        gqa: target and draft with grouped queries.
    """
    from transformers import AutoTokenizer

    pair = str(PAIR / "target"), str(PAIR / "draft")
    held_out = held_out_tokens(AutoTokenizer.from_pretrained(pair[0]), 16000)
    # Peaked, so that a few hundred samples say something.
    eight = make_llama(folder / "eight", vocab_size=8, num_kv_heads=2, std=0.25, query_scale=1.5)
    draft_of_eight = make_llama(folder / "draft8", vocab_size=8, num_layers=1, std=0.1, seed=1)
    twelve = joint.make_models(folder)
    gemma3 = make_architecture(folder / "gemma3", "gemma3")
    return {
        "pair": Model(*pair, held_out, has_tokenizer=True),
        "random": Model(*pair, _random(4096), has_tokenizer=True),
        "gqa": Model(gqa["target"], gqa["draft"], _random(4096)),
        "gemma3": Model(gemma3, "", _random(4000)),
        "eight": Model(eight, draft_of_eight, _random(8, least=0)),
        "twelve": Model(twelve["target"], twelve["draft"], joint.make_prompt()),
    }


def _random(vocab_size: int, least: int = 3) -> list[int]:
    draw = random.Random(vocab_size)
    return [draw.randrange(least, vocab_size) for _ in range(16000)]


class Exact:
    """A small target in transformers: the oracle for distributions."""

    def __init__(self) -> None:
        self._models: dict[str, object] = {}

    @torch.no_grad()
    def logits(self, target: str, prompt: list[int], new: list[int]) -> torch.Tensor:
        """Of every new token, [num_tokens, vocab_size], float64."""
        from transformers import LlamaForCausalLM

        if target not in self._models:
            self._models[target] = LlamaForCausalLM.from_pretrained(target).double()
        logits = self._models[target](torch.tensor([prompt + new])).logits[0]
        return logits[len(prompt) - 1 : -1]
