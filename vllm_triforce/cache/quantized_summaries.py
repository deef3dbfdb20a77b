"""Level 2's summaries of retrieval chunks on a GPU, in a byte a number."""

from dataclasses import dataclass

import torch

SCALE_BYTES = 4
"""Of one vector: the KV cache's share would be twice as large without."""


@dataclass
class QuantizedSummaries:
    """One vector for each layer, KV head and block id, rounded to 127 steps of its largest number.

    bfloat16 rounds that number as coarsely; blocks are ranked by sums over all numbers.
    """

    values: torch.Tensor  # [num_layers, num_kv_heads, num_blocks, head_dim], int8
    scales: torch.Tensor  # [num_layers, num_kv_heads, num_blocks], float32

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device) -> "QuantizedSummaries":
        return cls(
            torch.zeros(shape, dtype=torch.int8, device=device),
            torch.zeros(shape[:-1], dtype=torch.float32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + SCALE_BYTES * self.scales.numel()

    def of_layers(self, start: int, stop: int) -> "QuantizedSummaries":
        return QuantizedSummaries(self.values[start:stop], self.scales[start:stop])

    def of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """
        Args:
            blocks: int, of any shape.

        Returns:
            [num_layers, num_kv_heads, *blocks.shape, head_dim], float32.
        """
        return self.values[:, :, blocks].float() * self.scales[:, :, blocks, None]

    def write(self, layer: int, blocks: torch.Tensor, vectors: torch.Tensor) -> None:
        """
        Args:
            blocks: [n], int64.
            vectors: [num_kv_heads, n, head_dim].
        """
        vectors = vectors.float()
        scales = vectors.abs().amax(-1) / 127
        steps = vectors / scales.where(scales > 0, torch.ones(()))[..., None]
        self.values[layer].index_copy_(1, blocks, steps.round().to(torch.int8))
        self.scales[layer].index_copy_(1, blocks, scales)
