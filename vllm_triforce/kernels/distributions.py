"""What a level says of the next tokens, as kernels that draw and verify are told."""

from dataclasses import dataclass

import torch


@dataclass
class Distributions:
    """Distributions over the vocabulary, as logits before the temperature and their sums."""

    logits: torch.Tensor  # [num_rows, num_places, vocab_size], masked by top-k, top-p and min-p
    lse: torch.Tensor  # [num_rows, num_places], float32, logsumexp of logits / temperature


@dataclass
class LevelLogits:
    """A level's logits: of level 2's ``gamma + 1`` places, or of the one at which level 1 draws,
    and then without the dimension of places."""

    best: torch.Tensor  # [num_rows, num_places], int64, argmax
    top: torch.Tensor  # [num_rows, num_places], the largest; NaN where there is one
    distributions: Distributions | None  # None where all rows are greedy


@dataclass
class DrawParameters:
    """How each row's tokens are drawn."""

    temperature: torch.Tensor  # [num_rows], float32; 0 is greedy
    seeds: torch.Tensor  # [num_rows], int64
