"""Summaries of retrieval chunks by block id (paper, section 4.2: mean keys)."""

from dataclasses import dataclass

import torch

SCALE_BYTES = 4
"""Bytes of the scale of one vector."""


@dataclass
class QuantizedSummaries:
    """One int8 vector for each layer, KV head and block id, scaled by its largest number.

    The largest number is rounded as coarsely as in bfloat16, and blocks are ranked by sums over
    all numbers. Summaries then take half the memory of bfloat16.
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

    def dequantize(self, layer: int | slice, blocks: torch.Tensor) -> torch.Tensor:
        """Return summaries of blocks on a layer, or on a slice of layers.

        Args:
            blocks: block ids of any shape, int.

        Returns:
            [num_kv_heads, *blocks.shape, head_dim], float32, after the axis of a slice.
        """
        ids, shape = blocks.flatten(), blocks.shape
        values = self.values[layer].index_select(-2, ids).unflatten(-2, shape)
        scales = self.scales[layer].index_select(-1, ids).unflatten(-1, shape)
        return values * scales[..., None]

    def write(self, layer: int, blocks: torch.Tensor, vectors: torch.Tensor) -> None:
        """Quantize and store the summaries of blocks of one layer.

        Args:
            blocks: [n], int64.
            vectors: [num_kv_heads, n, head_dim].
        """
        vectors = vectors.float()
        scales = vectors.abs().amax(-1) / 127
        steps = vectors / scales.where(scales > 0, torch.ones(()))[..., None]
        self.values[layer].index_copy_(1, blocks, steps.round().to(torch.int8))
        self.scales[layer].index_copy_(1, blocks, scales)


_MAX_SCORE_BYTES = 128 << 20


def rows_scored_together(
    max_rows: int, max_chunks: int, num_heads: int, num_kv_heads: int, summary_numbers: int
) -> tuple[int, int]:
    """Divide the rows of a pass where a policy without kernels selects on Runner V2.

    Args:
        summary_numbers: numbers of a chunk's summaries of one KV head, of all kinds together.

    Returns:
        Rows that are scored at a time, at least one, and the bytes that this takes: gathered
        summaries with a temporary copy, scores, masked scores and votes.
    """
    row_bytes = 4 * max_chunks * (2 * summary_numbers * num_kv_heads + 3 * num_heads)
    num_rows = max(1, min(max_rows, _MAX_SCORE_BYTES // row_bytes))
    return num_rows, num_rows * row_bytes


TILE = 64
"""Chunks whose summaries ``kernels/pass_selection.py`` scores together."""


def num_vote_numbers(max_chunks: int, num_heads: int, num_kv_heads: int) -> int:
    """Count the numbers of 4 bytes that ``kernels/pass_selection.py`` keeps for a row."""
    num_tiles = -(-max_chunks // TILE)
    return num_tiles * (2 * num_heads + (num_heads + num_kv_heads) * TILE)
