"""Views of a paged KV cache of many heads as one of a single head, without a copy.

A block table belongs to a sequence, and selection is per KV head. So a request becomes
``num_kv_heads`` sequences of one head, which vLLM's paged attention kernel runs unchanged.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OneHeadBlocks:
    """Views in which block ``b`` of KV head ``h`` is block ``b * per_block + h * per_head``.

    In a head-major layout the views are a reshape. In vLLM's token-major layout the heads'
    tokens alternate, so the views' blocks overlap in memory. Only the ids of the formula are valid.
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
        """Make the views of a KV cache.

        Raises:
            ValueError: keys and values have different strides, or heads are not contiguous.
        """
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
            # The stride of the only head is not used, but kernels with TMA require alignment.
            return cache.as_strided(
                (count, block_size, 1, head_dim), (unit, token_stride, head_dim, 1)
            )

        return cls(view(key_cache), view(value_cache), per_block, per_head)
