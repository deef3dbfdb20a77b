"""Layout of a block of keys as an attention kernel stores it, found by a probe."""

from collections.abc import Callable

import torch

# Integers below these are exact in bfloat16 (8 bits of significand) and in fp8_e5m2 (3 bits).
_CODES = 256
_FP8_CODES = 8


def probe_key_order(
    write_block: Callable[[torch.Tensor], torch.Tensor],
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    is_fp8: bool = False,
) -> torch.Tensor:  # [head_dim, block_size], int64
    """Find where a block has the numbers of each head dimension, by writing and reading one block.

    vLLM's CPU kernels store the keys of a block transposed (``vec``), or packed in pairs for
    matrix units (``amx``). A mean along the wrong axis would silently lower acceptance, so the
    layout is probed: the kernel writes keys that encode their head dimension, which are read back
    raw.

    Args:
        write_block: stores keys [block_size, 1, head_dim] by the kernel and returns the raw block,
            block_size * head_dim numbers in any shape.
        dtype: type of the keys that ``write_block`` takes.
        is_fp8: True if the kernel stores keys as fp8 with a scale of 1.

    Raises:
        RuntimeError: the stored block is not a permutation of the keys.
    """
    dims = torch.arange(head_dim)
    base, weight = _FP8_CODES if is_fp8 else _CODES, 1
    dim_of_offset = torch.zeros(block_size * head_dim, dtype=torch.int64)
    while weight < head_dim:
        codes = dims // weight % base
        keys = codes.to(dtype).expand(block_size, 1, head_dim).contiguous()
        dim_of_offset += weight * write_block(keys).reshape(-1).to(torch.int64)
        weight *= base
    counts = torch.bincount(dim_of_offset.clamp(0, head_dim), minlength=head_dim + 1)
    if counts[head_dim] or not bool((counts[:head_dim] == block_size).all()):
        raise RuntimeError(
            f"the attention kernel stores blocks of {block_size} keys of {head_dim} numbers "
            "in a way that TriForce cannot read; use another attention backend"
        )
    return torch.argsort(dim_of_offset, stable=True).view(head_dim, block_size)
