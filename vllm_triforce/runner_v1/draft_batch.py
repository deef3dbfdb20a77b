"""What a model runner hands to TriForce and gets back: tensors and arrays, no runner."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_triforce.core.sampling import SamplingRows


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
    queries: list[Callable[[], torch.Tensor]]
    """Each gives [num_layers, num_heads, head_dim], the last accepted token's at level 3."""
    sampling: SamplingRows
    num_plain: int = 0
    """Further requests of the engine's step, which cannot be speculated on."""
    is_greedy: list[bool] | None = None
    """Whether level 3 decides by the argmax; None: as the inner levels do. What is drafted for a
    request with a grammar is certain, and yet it samples."""
    num_left: list[int] | None = None
    """Tokens that each may still emit; None where that is not known."""
    logits_processors: list[Callable[[torch.Tensor, list[int]], None] | None] = field(
        default_factory=list
    )
    """What each asks of its logits, [vocab_size], behind further tokens (``logit_shaping.py``),
    None for nothing; empty where nobody asks for anything."""

    def __len__(self) -> int:
        return len(self.request_ids)

    def context(self, proposal: "Proposal", row: int) -> np.ndarray:
        """[num_tokens], int32: a request's tokens with those proposed for it."""
        proposed = proposal.token_ids[row]
        if not proposed:
            return self.token_ids[row]
        return np.concatenate([self.token_ids[row], np.asarray(proposed, dtype=np.int32)])

    def has_seed(self, row: int) -> bool:
        return bool(self.sampling.seeds) and self.sampling.seeds[row] is not None

    def take(self, rows: list[int], max_num_tokens: list[int]) -> "DraftBatch":
        """Some of the requests, with other limits."""

        def pick(values):
            return [values[row] for row in rows]

        return DraftBatch(
            pick(self.request_ids),
            pick(self.token_ids),
            pick(self.num_computed_tokens),
            max_num_tokens,
            [pick(tables) for tables in self.block_tables],
            pick(self.queries),
            self.sampling.take(rows),
            logits_processors=pick(self.logits_processors) if self.logits_processors else [],
        )


@dataclass
class Proposal:
    """Tokens handed up, and the distribution each was drawn from."""

    token_ids: list[list[int]]
    probs: list[list[torch.Tensor | None]] | None
    """Per request and token [vocab_size], float32, or None where it was certain; None as a whole
    where every request is greedy."""
    num_planned: list[int]
    """Tokens that each request was to propose, fixed before any was drawn."""

    @classmethod
    def empty(cls, num_reqs: int, greedy: bool) -> "Proposal":
        tokens: list[list[int]] = [[] for _ in range(num_reqs)]
        probs = None if greedy else [[] for _ in range(num_reqs)]
        return cls(tokens, probs, [0] * num_reqs)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, row: int, token_ids: list[int], probs) -> None:
        """Adds to a request's proposal.

        Args:
            probs: of each token [vocab_size], or None; not looked at where all are greedy.
        """
        self.token_ids[row] += token_ids
        if self.probs is not None:
            self.probs[row] += probs

    def put(self, rows: list[int], other: "Proposal") -> None:
        """Takes over the proposals of some of the requests."""
        for i, row in enumerate(rows):
            self.extend(row, other.token_ids[i], None if other.probs is None else other.probs[i])
