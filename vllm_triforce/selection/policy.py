"""What a selection policy is: the score of a chunk. CONTRIBUTING.md tells how to add one to this
package, ``examples/custom_policy`` how to have one in a package of one's own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

import torch


class Summary(StrEnum):
    """A key that stands for those of a chunk, one number for each head dimension."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    def reduce(self, keys: torch.Tensor, dim: int) -> torch.Tensor:
        """In float32, of keys [..., tokens or head_dim, ...], without the axis ``dim``."""
        if self is Summary.MEAN:
            return keys.mean(dim, dtype=torch.float32)
        return (keys.amin(dim) if self is Summary.MIN else keys.amax(dim)).float()


Summaries = Mapping[Summary, torch.Tensor]
"""By kind [..., num_kv_heads, num_chunks, head_dim]."""


class SelectionPolicy(ABC):
    """Says which retrieval chunks level 2 reads, for all layers at once: those of the highest
    score.

    The first chunk (the attention sink) and the recent chunks are kept anyway. Both runners and
    the lab ask the same policy; what it says can lower acceptance, and never changes output.
    """

    name: ClassVar[str]
    """In ``speculative_config``, key ``selection``, and in the lab."""

    summaries: ClassVar[tuple[Summary, ...]] = ()
    """What is kept of each chunk's keys, as large as the KV cache divided by 2 * chunk each."""

    @abstractmethod
    def score(
        self,
        query: torch.Tensor,  # [..., num_kv_heads, group, head_dim], of the last accepted token
        summaries: Summaries,  # those of the policy, [..., num_kv_heads, num_chunks, head_dim]
        num_chunks: int,  # in their order in the context
    ) -> torch.Tensor:  # [..., num_kv_heads, group or 1, num_chunks]
        """Of each chunk, for each query head of a KV head's group, or one for the whole group.

        Where a score is NaN, what is chosen for that KV head is undefined; output stays right. One
        given for the whole group, or to a group of one head, is chosen before all others, on the
        device before the first chunk too. One of a head among several, or -inf for all chunks,
        makes every vote of its group NaN.
        """

    def checked_score(
        self,
        query: torch.Tensor,  # [..., num_kv_heads, group, head_dim]
        summaries: Summaries,  # [..., num_kv_heads, num_chunks, head_dim]
        num_chunks: int,
    ) -> torch.Tensor:  # [..., num_kv_heads, group or 1, num_chunks]
        """``score()``, as the runners and the lab ask for it.

        Raises:
            ValueError: it has another shape, which could be read as what it is not.
        """
        scores = self.score(query, summaries, num_chunks)
        *leading, group, _ = query.shape
        found = tuple(scores.shape)
        if found not in ((*leading, group, num_chunks), (*leading, 1, num_chunks)):
            heads = [f"{group} (or 1)" if group > 1 else 1]
            wanted = ", ".join(map(str, [*leading, *heads, num_chunks]))
            raise ValueError(
                f"selection policy {self.name!r}: score() gave {list(found)}; it has to be "
                f"[{wanted}]: leading axes, KV heads, query heads of each, chunks"
            )
        return scores

    @staticmethod
    def votes(
        scores: torch.Tensor,  # [..., num_kv_heads, group or 1, num_chunks]; -inf: no candidate
        head_dim: int,
    ) -> torch.Tensor:  # [..., num_kv_heads, num_chunks]
        """With grouped-query attention the query heads of a group vote together: each gives every
        chunk the softmax of its scaled scores, and the votes are added up, so that a head with
        large logits does not outvote the others."""
        if scores.shape[-2] == 1:
            return scores.squeeze(-2)
        return (scores.float() * head_dim**-0.5).softmax(-1).sum(-2)

    def select(
        self,
        query: torch.Tensor,  # [num_layers, num_heads, head_dim]
        summaries: Summaries,  # by kind [num_layers, num_kv_heads, num_chunks, head_dim]
        num_kv_heads: int,
        num_chunks: int,
        num_selected: int,
    ) -> torch.Tensor:  # [num_layers, num_kv_heads, num_selected], indices of chunks
        """The best ``num_selected <= num_chunks`` candidates of each layer and KV head."""
        grouped = query.unflatten(1, (num_kv_heads, -1))
        scores = self.checked_score(grouped, summaries, num_chunks)
        votes = self.votes(scores, query.shape[-1])
        return votes.topk(num_selected, dim=-1, sorted=False).indices
