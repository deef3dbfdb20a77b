"""What a selection policy is; CONTRIBUTING.md tells how to add one."""

from abc import ABC, abstractmethod

import torch


class SelectionPolicy(ABC):
    """Chooses the retrieval chunks that level 2 reads, for all layers at once.

    The first chunk (the attention sink) and the recent chunks are kept anyway and are not
    among the candidates.
    """

    needs_scores: bool = True
    """False where no summaries and no queries are needed: then none are kept."""

    @abstractmethod
    def select(
        self,
        query: torch.Tensor,  # [num_layers, num_heads, head_dim], of the last accepted token
        chunk_mean_keys: torch.Tensor,  # [num_layers, num_kv_heads, num_chunks, head_dim]
        num_selected: int,
    ) -> torch.Tensor:  # [num_layers, num_kv_heads, num_selected], indices of chunks
        """Picks ``num_selected <= num_chunks`` chunks for each layer and KV head."""
