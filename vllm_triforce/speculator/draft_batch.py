"""What a model runner hands to TriForce and gets back: tensors and arrays, no runner."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class SamplingRows:
    """Sampling parameters, a row per request."""

    temperature: torch.Tensor  # [num_reqs], float32; 0 is greedy
    top_k: torch.Tensor | None = None  # [num_reqs], int
    top_p: torch.Tensor | None = None  # [num_reqs], float32
    min_p: torch.Tensor | None = None  # [num_reqs], float32
    seeds: list[int | None] = field(default_factory=list)
    """[num_reqs], the request's own seed."""

    @property
    def all_greedy(self) -> bool:
        return bool((self.temperature < GREEDY_EPSILON).all())

    @property
    def is_greedy(self) -> torch.Tensor:  # [num_reqs], bool
        return self.temperature < GREEDY_EPSILON

    def take(self, rows: list[int]) -> "SamplingRows":
        """The parameters of some rows, in their order; rows may repeat."""

        def pick(values):
            return None if values is None else values[rows]

        return SamplingRows(
            self.temperature[rows],
            pick(self.top_k),
            pick(self.top_p),
            pick(self.min_p),
            [self.seeds[row] for row in rows] if self.seeds else [],
        )


# As _SAMPLING_EPS in vllm/v1/sample/sampler.py.
GREEDY_EPSILON = 1e-5


@dataclass
class DraftBatch:
    """Requests to speculate on, after a full pass; all lists have one entry per request."""

    request_ids: list[str]
    token_ids: list[np.ndarray]
    """[num_computed_tokens + 1], int32: prompt, output and the token just sampled."""
    num_computed_tokens: list[int]
    """Tokens whose KV the full pass has written and accepted."""
    max_num_tokens: list[int]
    """Longest proposal that fits the slots which the scheduler reserved; at least 1."""
    block_tables: list[list[np.ndarray]]
    """For each KV cache group, each request's allocated block ids."""
    queries: list[torch.Tensor]
    """[num_layers, num_heads, head_dim], the last accepted token's at level 3."""
    sampling: SamplingRows

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass
class Proposal:
    """Tokens handed up, and the distribution each was drawn from."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor]] | None
    """Per request and token [vocab_size], float32; None where every request is greedy."""

    @classmethod
    def empty(cls, num_reqs: int, greedy: bool) -> "Proposal":
        tokens: list[list[int]] = [[] for _ in range(num_reqs)]
        return cls(tokens, None if greedy else [[] for _ in range(num_reqs)])

    def __len__(self) -> int:
        return len(self.token_ids)
