"""What a model runner hands to TriForce and gets back: tensors and arrays, no runner."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_triforce.verification.sampling_rows import SamplingRows


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
