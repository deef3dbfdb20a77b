"""Summaries of retrieval chunks by block id (paper, section 4.2: mean keys).

``ChunkSummaries`` has Runner V1's, ``QuantizedSummaries`` Runner V2's, at a byte a number.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_triforce.selection import Summary

BlockSummaries = Sequence[Callable[[torch.Tensor, Summary], torch.Tensor]]
"""One function for each layer, from block ids [n] and a kind to [n, num_kv_heads, head_dim]."""


class ChunkSummaries:
    """Summaries of full blocks, one for each kind, layer, KV head and block id.

    Each kind is as large as the KV cache divided by ``2 * block_size``.

    Args:
        kinds: ``SelectionPolicy.summaries``, maybe empty.
        num_layers, num_kv_heads, head_dim: sizes of the layers that retrieve.
        num_blocks: blocks in vLLM's pool.
        dtype: type of the model.
        block_summaries: functions of the attention platform.
    """

    def __init__(
        self,
        kinds: Iterable[Summary],
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_summaries: BlockSummaries,
    ) -> None:
        self.num_layers, self.num_blocks, self.num_kv_heads = num_layers, num_blocks, num_kv_heads
        # Head-major, so that one gather gives the operand of a batched product.
        shape = (num_layers, num_kv_heads, num_blocks, head_dim)
        self.keys = {kind: torch.zeros(shape, dtype=dtype) for kind in kinds}
        """By kind, [num_layers, num_kv_heads, num_blocks, head_dim]."""
        self._block_summaries = block_summaries

    def update(
        self,
        block_ids: torch.Tensor,  # [n], int64, full blocks
    ) -> None:
        """Summarize blocks that became full."""
        for kind, keys in self.keys.items():
            for layer, summarize in zip(keys, self._block_summaries):
                vectors = summarize(block_ids, kind).transpose(0, 1)  # [num_kv_heads, n, head_dim]
                layer.index_copy_(1, block_ids, vectors.to(layer.dtype))

    def gather(
        self,
        block_ids: torch.Tensor,  # [n], int64
    ) -> dict[Summary, torch.Tensor]:  # by kind [num_layers, num_kv_heads, n, head_dim]
        return {kind: keys.index_select(2, block_ids) for kind, keys in self.keys.items()}


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

    def dequantize(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return summaries of blocks on a layer.

        Args:
            blocks: block ids of any shape, int.

        Returns:
            [num_kv_heads, *blocks.shape, head_dim], float32.
        """
        return self.values[layer][:, blocks].float() * self.scales[layer][:, blocks, None]

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
