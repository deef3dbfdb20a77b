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


@dataclass(frozen=True)
class SamplingParameters:
    """What requests are sampled by: vLLM's tensors, each [max_num_reqs], by state
    (vllm/v1/worker/gpu/sample/states.py)."""

    temperature: torch.Tensor  # float32; 0 is greedy
    seeds: torch.Tensor  # int64
    top_k: torch.Tensor  # int32; the vocabulary's size for none
    top_p: torch.Tensor  # float32; 1 for none
    min_p: torch.Tensor  # float32; 0 for none
