"""Base class of selection policies, which score retrieval chunks.

CONTRIBUTING.md shows a new policy in this package, ``examples/custom_policy`` one in another.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

import torch


class Summary(StrEnum):
    """Kind of a chunk's summary: a vector of head_dim numbers in place of the chunk's keys."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    def reduce(self, keys: torch.Tensor, dim: int) -> torch.Tensor:
        """Reduce the tokens of keys, on axis ``dim``, to float32 numbers."""
        if self is Summary.MEAN:
            return keys.mean(dim, dtype=torch.float32)
        return (keys.amin(dim) if self is Summary.MIN else keys.amax(dim)).float()


Summaries = Mapping[Summary, torch.Tensor]
"""By kind, [..., num_kv_heads, num_chunks, head_dim]."""


class SelectionPolicy(ABC):
    """Scores retrieval chunks; level 2 reads the best.

    Inside a pass of level 2 it scores a layer's chunks with the query of a request's newest settled
    token. The first chunk (the attention sink) and the recent chunks are always read. Both runners
    and the lab use the same class. Scores can lower acceptance and never change output. CUDA
    graphs hold ``score`` on Runner V2, so it must not wait for the device.
    """

    name: ClassVar[str]
    """Value of the key ``selection`` in ``speculative_config``, and name in the lab."""

    summaries: ClassVar[tuple[Summary, ...]] = ()
    """Summaries that ``score`` reads, each as large as the KV cache divided by 2 * chunk size."""

    @abstractmethod
    def score(
        self,
        query: torch.Tensor,  # [..., num_kv_heads, group, head_dim]
        summaries: Summaries,  # the policy's kinds, [..., num_kv_heads, num_chunks, head_dim]
        num_chunks: int,  # chunks in the order of the context
    ) -> torch.Tensor:  # [..., num_kv_heads, group or 1, num_chunks]
        """Score each chunk for each query head of a KV head, or once for its whole group.

        After a NaN score, the selection of that KV head is undefined and output stays right. A
        NaN for a whole group, or for a group of one head, ranks above all numbers. A NaN of one
        head among several makes every vote of the group NaN, as does -inf for all chunks.
        """

    def best_chunks(
        self,
        query: torch.Tensor,  # [..., num_kv_heads, group, head_dim]
        summaries: Summaries,  # [..., num_kv_heads, num_chunks, head_dim]
        num_chunks: int,
        count: int,
        is_other: torch.Tensor | None = None,  # [..., 1, num_chunks], True for no candidate
    ) -> torch.Tensor:  # [..., num_kv_heads, count], int64
        """Return the chunks with the most votes of the query heads of each group, best first.

        The vote of a head is the softmax of scaled scores, so that a head with large logits does
        not outvote the others. Chunks that are no candidates come last.

        Raises:
            ValueError: the scores have another shape, which might broadcast silently.
        """
        scores = self.score(query, summaries, num_chunks)
        *leading, group, head_dim = query.shape
        shape = tuple(scores.shape)
        if shape not in ((*leading, group, num_chunks), (*leading, 1, num_chunks)):
            heads = [f"{group} (or 1)" if group > 1 else 1]
            expected = ", ".join(map(str, [*leading, *heads, num_chunks]))
            raise ValueError(
                f"selection policy {self.name!r}: score() gave {list(shape)}; it has to be "
                f"[{expected}]: leading axes, KV heads, query heads of each, chunks"
            )
        if is_other is not None:
            scores = scores.masked_fill(is_other[..., None, :], float("-inf"))
        if shape[-2] == 1:
            votes = scores.squeeze(-2)
        else:
            votes = (scores.float() * head_dim**-0.5).softmax(-1).sum(-2)
        if is_other is not None:
            # Candidates may have no vote, or a policy's own -inf.
            votes = votes.clamp(min=torch.finfo(votes.dtype).min)
            votes = votes.masked_fill(is_other, float("-inf"))
        return votes.topk(count).indices
