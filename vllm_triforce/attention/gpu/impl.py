"""Implementation of a layer on a GPU: a subclass of the backend's own."""

from typing import TYPE_CHECKING

import torch

from vllm_triforce.attention.base import HostLayer, metadata_of, replace_impl
from vllm_triforce.attention.gpu.backends import backend_of, kernel_for, key_and_value
from vllm_triforce.attention.gpu.paged_kernels import PagedKernel, PagedSequences, SparseSequences
from vllm_triforce.cache.one_head_blocks import OneHeadBlocks
from vllm_triforce.config.budget import chunk_size

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl as ImplBase
else:
    # A mixin comes before its base, so only type checkers see a backend's class here.
    ImplBase = object


class _RetrievalImpl(ImplBase):
    """Mixin over a backend's implementation; ``attach`` makes the subclass.

    The metadata of our passes is ``SparseSequences`` for level 2, and ``PagedSequences`` with a
    sequence per request for level 1's draft over its private cache.
    """

    layer_index: int
    offload: HostLayer | None
    kernel: PagedKernel

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if self.offload is not None and isinstance(metadata_of(layer), SparseSequences):
            kv_cache = self.offload.pool
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        if self.offload is not None:
            kv_cache = self._device_cache(kv_cache, attn_metadata)
        if isinstance(attn_metadata, PagedSequences):
            if output_scale is None:
                return self._forward_paged(layer, query, kv_cache, attn_metadata, output)
            if output_block_scale is not None:
                raise ValueError(
                    "fuse_attn_quant with block scales (NVFP4): level 2's attention writes one "
                    'scale; set compilation_config={"pass_config": {"fuse_attn_quant": false}}'
                )
            exact = torch.empty(output.shape, dtype=query.dtype, device=output.device)
            self._forward_paged(layer, query, kv_cache, attn_metadata, exact)
            return _quantize(exact, output_scale, output)
        arguments = layer, query, key, value, kv_cache, attn_metadata, output
        return super().forward(*arguments, output_scale, output_block_scale)

    def _device_cache(self, kv_cache, metadata):
        """Return the device copy of a KV cache in host memory."""
        assert self.offload is not None
        if isinstance(metadata, SparseSequences):
            return self.offload.pool
        if metadata is None:  # a profiling pass at start reads no KV cache
            return kv_cache
        return self.offload.stage(metadata.block_table, metadata.seq_lens)

    def _forward_paged(self, layer, query, kv_cache, sequences: PagedSequences, output):
        keys, values = key_and_value(kv_cache, self)
        if not isinstance(sequences, SparseSequences):
            type(self).kernel(layer, self, query, keys, values, sequences, output)
            return output
        blocks = OneHeadBlocks.of(keys, values, chunk_size(keys.shape[1]))
        heads, length = self.num_kv_heads, sequences.max_query_len
        shape = (len(query) * heads, self.num_heads // heads, self.head_size)

        def by_head(x: torch.Tensor) -> torch.Tensor:
            # A sequence's tokens lie together: [num_reqs, heads, length, group, head_size].
            return x.view(-1, length, heads, *shape[1:]).transpose(1, 2)

        # Queries are copied once, by the selection where there is one.
        ordered = None
        if sequences.selection is not None:
            ordered = sequences.selection.select(self.layer_index, query)
        if ordered is None:
            ordered = by_head(query).reshape(shape)
        target = (
            output.view(shape) if length == 1 else torch.empty_like(ordered, dtype=output.dtype)
        )
        type(self).kernel(layer, self, ordered, blocks.key, blocks.value, sequences, target)
        if length > 1:
            by_head(output).copy_(target.view(-1, heads, length, *shape[1:]))
        return output


def _quantize(
    exact: torch.Tensor,  # [num_tokens, num_heads * head_dim]
    scale: torch.Tensor,  # [1], float32
    output: torch.Tensor,  # the same shape, of 8 bits, written
) -> torch.Tensor:
    """Quantize attention's output as vLLM's kernels do (``fuse_attn_quant``)."""
    bounds = torch.finfo(output.dtype)
    return output.copy_((exact.float() / scale).clamp(bounds.min, bounds.max))


def attach(layer, layer_index: int, offload: HostLayer | None = None) -> None:
    """Replace a layer's implementation by a subclass of it, with the same settings.

    Args:
        layer_index: index among the layers that retrieve.
        offload: the layer's KV cache, where it lies in host memory.

    Raises:
        ValueError: the attention backend is not supported.
    """
    impl_cls, backend = type(layer.impl), backend_of(layer.impl)
    if backend is None:
        raise ValueError(
            f"attention backend with {impl_cls.__name__} is not one that TriForce knows; "
            "use --attention-backend FLASH_ATTN, FLASHINFER or TRITON_ATTN"
        )
    if offload is not None and backend.plans_on_host:
        raise ValueError(
            "kv_offload_gib with FLASHINFER, which vLLM chose here: its plans do not know "
            "staged layers yet; use --attention-backend FLASH_ATTN or TRITON_ATTN"
        )
    attributes = {"kernel": staticmethod(kernel_for(layer.impl, layer.kv_cache.dtype))}
    subclass = type(f"Retrieval{impl_cls.__name__}", (_RetrievalImpl, impl_cls), attributes)
    replace_impl(layer, subclass, layer_index=layer_index, offload=offload)
