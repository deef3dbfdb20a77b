"""Copies of the recurrent states of gated delta nets, from the full pass's to level 2's."""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

_BLOCK = tl.constexpr(2048)


@dataclass
class StateViews:
    """States of one kind in all layers, as matrices: tokens of the convolution, or one row.

    Args:
        sources: per layer, the full pass's [num_blocks, num_tokens, size], any strides.
        copies: per layer, level 2's [num_states, num_tokens, size], any strides.
    """

    sources: list[torch.Tensor]
    copies: list[torch.Tensor]

    def __post_init__(self) -> None:
        for views in (self.sources, self.copies):
            if len({(view.shape, view.stride(), view.dtype) for view in views}) != 1:
                raise ValueError("the recurrent layers have states of different layouts")
        addresses = [[view.data_ptr() for view in pair] for pair in zip(self.sources, self.copies)]
        device = self.sources[0].device
        self._addresses = torch.tensor(addresses, dtype=torch.uint64, device=device)

    def copy(
        self,
        blocks: torch.Tensor,  # [num_groups, max_rows], int64, source of each row, by KV group
        groups: torch.Tensor,  # [num_layers], int32, KV group of each layer
        first_tokens: torch.Tensor,  # [max_rows], int32, of the sources
        num_tokens: int,
        num_rows: int,
    ) -> None:
        """Copy ``num_tokens`` tokens of each row's source to state ``1 + row``, from token 0 on."""
        source, to = self.sources[0], self.copies[0]
        size = source.shape[2]
        _copy_states_kernel[(num_rows, len(groups), triton.cdiv(num_tokens * size, _BLOCK.value))](
            self._addresses,
            source,
            to,
            blocks,
            blocks.stride(0),
            groups,
            first_tokens,
            num_tokens,
            size,
            *source.stride(),
            *to.stride(),
        )


@triton.jit
def _copy_states_kernel(
    addresses_ptr,  # [num_layers, 2], uint64, of the sources and the copies
    source_like,  # any tensor of their dtypes
    copy_like,
    blocks_ptr,  # [num_groups, max_rows]
    group_stride,
    groups_ptr,  # [num_layers]
    first_tokens_ptr,  # [max_rows]
    num_tokens,
    size,
    block_stride,
    token_stride,
    number_stride,
    copy_state_stride,
    copy_token_stride,
    copy_number_stride,
):
    row = tl.program_id(0)
    layer = tl.program_id(1)
    place = tl.program_id(2) * _BLOCK + tl.arange(0, _BLOCK)
    token, number = (place // size).to(tl.int64), (place % size).to(tl.int64)
    mask = token < num_tokens
    group = tl.load(groups_ptr + layer)
    block = tl.load(blocks_ptr + group * group_stride + row)
    addresses_ptr += layer * 2
    source = tl.cast(tl.load(addresses_ptr), tl.pointer_type(source_like.dtype.element_ty))
    copy = tl.cast(tl.load(addresses_ptr + 1), tl.pointer_type(copy_like.dtype.element_ty))
    source += block * block_stride + tl.load(first_tokens_ptr + row) * token_stride
    values = tl.load(source + token * token_stride + number * number_stride, mask=mask)
    copy += (1 + row).to(tl.int64) * copy_state_stride
    out = copy + token * copy_token_stride + number * copy_number_stride
    tl.store(out, values.to(copy_like.dtype.element_ty), mask=mask)
