"""Logits of a level and sampling parameters, as arguments of kernels that draw and verify."""

from dataclasses import dataclass

import torch


@dataclass
class Distributions:
    """Distributions over the vocabulary, as logits before the temperature and their logsumexp."""

    logits: torch.Tensor  # [num_rows, num_places, vocab_size], masked by top-k, top-p and min-p
    lse: torch.Tensor  # [num_rows, num_places], float32, logsumexp of logits / temperature


@dataclass
class LevelLogits:
    """Logits of a level: of level 2's ``gamma + 1`` places, or of the place at which level 1 draws.

    Level 1's have no dimension of places.
    """

    best: torch.Tensor  # [num_rows, num_places], int64, argmax
    top: torch.Tensor  # [num_rows, num_places], the largest logit; NaN where any logit is NaN
    distributions: Distributions | None  # None where all rows are greedy


@dataclass(frozen=True)
class SamplingParameters:
    """vLLM's sampling parameters, each [max_num_reqs], by state
    (vllm/v1/worker/gpu/sample/states.py)."""

    temperature: torch.Tensor  # float32; 0 is greedy
    seeds: torch.Tensor  # int64
    top_k: torch.Tensor  # int32; the vocabulary's size for none
    top_p: torch.Tensor  # float32; 1 for none
    min_p: torch.Tensor  # float32; 0 for none
