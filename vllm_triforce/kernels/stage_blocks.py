"""Staging of one layer's KV blocks from host memory, for the requests of a step."""

import torch
from vllm.triton_utils import tl, triton

from vllm_triforce.kernels import counters as count

# A few programs fill PCIe, and other kernels need the rest of the device.
_NUM_PROGRAMS = 32
_BLOCK = 4096


@triton.jit(do_not_specialize=["num_reqs"])
def _stage_blocks_kernel(
    host_ptr,  # [num_blocks, page_size]
    staging_ptr,  # [num_blocks, page_size], written
    page_size,
    tables_ptr,  # [num_reqs, table_stride]
    table_stride,
    seq_lens_ptr,  # [num_reqs]
    num_reqs,
    block_size,
    counters_ptr,  # [num_counters], added to
    BLOCK: tl.constexpr,
):
    first, step = tl.program_id(0), tl.num_programs(0)
    staged_bytes = tl.zeros([], dtype=tl.int64)
    total = tl.zeros([], dtype=tl.int32)
    for row in range(0, num_reqs):
        num_blocks = tl.cdiv(tl.load(seq_lens_ptr + row), block_size)
        staged_bytes += num_blocks.to(tl.int64) * page_size * 4
        # Programs take the blocks of all requests in turn, because a request may have only one.
        for index in range((first + step - total % step) % step, num_blocks, step):
            block = tl.load(tables_ptr + row * table_stride + index).to(tl.int64) * page_size
            for start in range(0, page_size, BLOCK):
                places = start + tl.arange(0, BLOCK)
                mask = places < page_size
                words = tl.load(host_ptr + block + places, mask=mask)
                tl.store(staging_ptr + block + places, words, mask=mask)
        total += num_blocks
    if first == 0:
        tl.atomic_add(counters_ptr + count.NUM_STAGED_BYTES, staged_bytes)


def stage_blocks(
    host: torch.Tensor,  # [num_blocks, ...], blocks contiguous and one after the other
    staging: torch.Tensor,  # the same shape and strides, on the device; written
    tables: torch.Tensor,  # [num_reqs, width], int32, block tables
    seq_lens: torch.Tensor,  # [num_reqs], int32, tokens that attention will read
    block_size: int,
    counters: torch.Tensor,  # [len(DeviceCounter)], int64, added to
) -> None:
    """Copy each request's blocks, up to its length, to the same block ids of the staging buffer.

    The device reads the lengths, so a CUDA graph may hold the launch.
    """
    page = host.stride(0)
    # In words of 4 bytes, for any dtype of the cache.
    size = page * host.element_size() // 4
    _stage_blocks_kernel[(min(_NUM_PROGRAMS, tables.shape[1]),)](
        _as_words(host),
        _as_words(staging),
        size,
        tables,
        tables.stride(0),
        seq_lens,
        min(len(tables), len(seq_lens)),
        block_size,
        counters,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
    )


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """View the cache's memory from its first block on as int32."""
    flat = cache.as_strided((cache.shape[0] * cache.stride(0),), (1,))
    return flat.view(torch.int32)
