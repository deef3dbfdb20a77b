"""Views of a paged KV cache of many heads as one of a single head, without a copy.

A block table belongs to a sequence, and selection is per KV head. So a request becomes
``num_kv_heads`` sequences of one head, which vLLM's paged attention kernel runs unchanged. A large
KV block is several chunks, so that a chunk can be retrieved without its neighbors.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class ChunkIds(NamedTuple):
    """Ids of one-head blocks by chunk and KV head (``of()``).

    Chunk ``c`` is part ``c % split`` of KV block ``c // split``.
    """

    per_block: int
    per_head: int
    per_part: int = 0
    split: int = 1  # chunks of a KV block

    def of(self, chunks: Any, heads: Any) -> Any:  # numbers, or tensors of integers
        ids = chunks // self.split * self.per_block + chunks % self.split * self.per_part
        return ids + heads * self.per_head


@dataclass(frozen=True)
class OneHeadBlocks:
    """Views whose blocks have the numbers of ``ids``.

    In a head-major layout the views are a reshape. In vLLM's token-major layout the heads'
    tokens alternate, so the views' blocks overlap in memory. Only the ids of the formula are valid.
    """

    key: torch.Tensor  # [num_virtual_blocks, chunk_size, 1, head_dim]
    value: torch.Tensor  # [num_virtual_blocks, chunk_size, 1, head_dim]
    ids: ChunkIds

    @classmethod
    def of(
        cls,
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], any strides
        value_cache: torch.Tensor,  # the same shape and strides
        chunk_size: int | None = None,
    ) -> "OneHeadBlocks":
        """Make the views of a KV cache.

        Args:
            chunk_size: tokens, a divisor of ``block_size``; by default that.

        Raises:
            ValueError: keys and values have different strides, or heads are not contiguous.
        """
        num_blocks, block_size, num_heads, head_dim = key_cache.shape
        block_stride, token_stride, head_stride, last = key_cache.stride()
        split = block_size // (chunk_size or block_size)
        if key_cache.stride() != value_cache.stride() or last != 1:
            raise ValueError(
                f"keys have strides {key_cache.stride()}, values {value_cache.stride()}: level 2 "
                "needs equal strides and contiguous heads; use another attention backend"
            )
        part_stride = block_size // split * token_stride * (split > 1)
        unit = math.gcd(block_stride, head_stride, part_stride)
        ids = ChunkIds(block_stride // unit, head_stride // unit, part_stride // unit, split)
        count = ids.of(num_blocks * split - 1, num_heads - 1) + 1

        def view(cache: torch.Tensor) -> torch.Tensor:
            # The stride of the only head is not used, but kernels with TMA require alignment.
            return cache.as_strided(
                (count, block_size // split, 1, head_dim), (unit, token_stride, head_dim, 1)
            )

        return cls(view(key_cache), view(value_cache), ids)
