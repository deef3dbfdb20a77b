"""A paged KV cache of many heads, seen as one of a single head: no copy, any layout.

A block table belongs to a sequence, and selection is per KV head. So a request becomes
``num_kv_heads`` sequences of one head, and attention over them is the ordinary paged kernel.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OneHeadBlocks:
    """Views in which the block of KV head ``h`` with id ``b`` is ``b * per_block + h * per_head``.

    Head-major blocks lie one after the other, so the views are a plain reshape. Elsewhere
    (vLLM's token-major layout) a head's tokens are interleaved with other heads': the views'
    blocks then overlap in memory, and only those that the formula names mean anything.
    """

    key: torch.Tensor  # [num_virtual_blocks, block_size, 1, head_dim]
    value: torch.Tensor  # [num_virtual_blocks, block_size, 1, head_dim]
    per_block: int
    per_head: int

    @classmethod
    def of(
        cls,
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], any strides
        value_cache: torch.Tensor,  # the same shape and strides
    ) -> "OneHeadBlocks":
        """Raises ValueError where keys and values lie differently, or a head is not contiguous."""
        num_blocks, block_size, num_heads, head_dim = key_cache.shape
        block_stride, token_stride, head_stride, last = key_cache.stride()
        if key_cache.stride() != value_cache.stride() or last != 1:
            raise ValueError(
                f"keys have strides {key_cache.stride()}, values {value_cache.stride()}: level 2 "
                "needs equal strides and contiguous heads; use another attention backend"
            )
        unit = math.gcd(block_stride, head_stride)
        per_block, per_head = block_stride // unit, head_stride // unit
        count = (num_blocks - 1) * per_block + (num_heads - 1) * per_head + 1

        def view(cache: torch.Tensor) -> torch.Tensor:
            # The stride of the only head is never used; kernels with TMA want it aligned.
            return cache.as_strided(
                (count, block_size, 1, head_dim), (unit, token_stride, head_dim, 1)
            )

        return cls(view(key_cache), view(value_cache), per_block, per_head)
