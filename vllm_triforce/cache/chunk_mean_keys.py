"""Level 2's summaries: the mean key of every retrieval chunk, kept by block id (paper, 4.2)."""

from collections.abc import Callable, Sequence

import torch


class ChunkMeanKeys:
    """Mean keys of full blocks, one per layer, KV head and block id.

    Held beside the KV cache and as large as it divided by ``2 * block_size``.

    Args:
        num_layers, num_kv_heads, head_dim: geometry of the layers that retrieve.
        num_blocks: blocks in vLLM's pool.
        dtype: the model's.
        block_means: for each layer, a function from block ids [n] to [n, num_kv_heads, head_dim].
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        block_means: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        # Head-major, so that one gather gives the operand of a batched product.
        self.means = torch.zeros(
            num_layers, num_kv_heads, num_blocks, head_dim, dtype=dtype, device=device
        )
        self._block_means = block_means

    @property
    def num_bytes(self) -> int:
        return self.means.numel() * self.means.element_size()

    def update(
        self,
        block_ids: torch.Tensor,  # [n], int64, full blocks
    ) -> None:
        """Computes the means of blocks that became full."""
        for layer, block_means in enumerate(self._block_means):
            means = block_means(block_ids).transpose(0, 1)  # [num_kv_heads, n, head_dim]
            self.means[layer].index_copy_(1, block_ids, means.to(self.means.dtype))

    def gather(
        self,
        block_ids: torch.Tensor,  # [n], int64
    ) -> torch.Tensor:  # [num_layers, num_kv_heads, n, head_dim]
        return self.means.index_select(2, block_ids)
