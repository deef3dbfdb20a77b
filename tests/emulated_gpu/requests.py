"""The models, and the batch that every case serves."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from tests.models import add_mtp_layer, make_architecture, make_head, make_llama

VOCAB_SIZE = 512  # the grid of a sampler grows with it
MIN_CONTEXT = 32
GREEDY = {"temperature": 0.0}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3}


@dataclass(frozen=True)
class Request:
    name: str
    num_prompt_tokens: int
    params: dict = field(default_factory=lambda: GREEDY)
    share: float = 1.0
    """Of a case's tokens that it asks for."""

    def max_tokens(self, most: int) -> int:
        return max(1, round(self.share * most))

    @property
    def is_greedy(self) -> bool:
        return self.params["temperature"] == 0

    @property
    def prompt(self) -> list[int]:
        """Tokens at random that come again, so that prompt lookup finds some."""
        draw = random.Random(self.num_prompt_tokens)
        some = [draw.randrange(3, VOCAB_SIZE) for _ in range(29)]
        return (some * 8)[: self.num_prompt_tokens]


# More than are served at a time: first some with top-k, top-p or min-p beside greedy ones, then one
# with a temperature alone, then greedy ones among themselves, then those that ask more of logits.
REQUESTS = (
    Request("greedy, long", 151),
    Request(
        "sampled, top-p and min-p",
        111,
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
        share=0.3,
    ),
    Request("seed and top-k", 90, {"temperature": 0.8, "top_k": 40, "seed": 7}, share=0.3),
    Request("greedy, below min_context: proposes nothing", 4),
    Request("seed", 96, {"temperature": 0.8, "seed": 3}, share=0.5),
    Request("greedy, short", 40),
    Request("greedy, penalties", 104, GREEDY | PENALTIES),
    Request(
        "sampled, with everything",
        88,
        {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logit_bias": {7: 2.0, 40: -9.0}}
        | PENALTIES
        | {"_bad_words_token_ids": [[11], [12, 13]]},
        share=0.4,
    ),
    Request("greedy, of two tokens", 131, GREEDY | {"allowed_token_ids": [7, 40]}),
)


class Models(NamedTuple):
    """Folders."""

    target: str
    draft: str
    head: str


def make_models(folder: Path, kind: str) -> Models:
    """A random target, the target disturbed a little as its draft, and a random EAGLE-3 head.

    Args:
        kind: of the target: "llama", or one of ``ARCHITECTURES``. "qwen3.5" has an MTP layer and no
            draft model, others no head.
    """
    from transformers import AutoModelForCausalLM

    if kind != "llama":
        changes = dict(vocab_size=VOCAB_SIZE, max_position_embeddings=1024, query_scale=2)
        target = make_architecture(folder / "target", kind, **changes)
        if kind == "qwen3.5":
            add_mtp_layer(target)
            return Models(target, "", target)
    else:
        shape = dict(vocab_size=VOCAB_SIZE, hidden_size=128, num_heads=4, num_kv_heads=2)
        target = make_llama(
            folder / "target", **shape, std=0.1, query_scale=2, max_position_embeddings=1024
        )
    draft = AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.03 * weight.std() * torch.randn_like(weight))
    draft.save_pretrained(folder / "draft")
    head = ""
    if kind == "llama":
        head = make_head(folder / "head", target, draft_vocab=VOCAB_SIZE // 2, layers=(0, 1, 2))
    return Models(target, str(folder / "draft"), head)
