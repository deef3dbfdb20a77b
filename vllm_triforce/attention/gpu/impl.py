"""Implementation of a layer on a GPU: a subclass of the backend's own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_triforce.attention.base import LayerOffload, metadata_of, replace_impl
from vllm_triforce.attention.gpu.backends import backend_of, kernel_for, key_and_value
from vllm_triforce.attention.gpu.paged_kernels import PagedKernel, PagedSequences
from vllm_triforce.attention.query_recorder import Recorder
from vllm_triforce.cache.one_head_blocks import OneHeadBlocks

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl as ImplBase
else:
    # A mixin comes before its base, so only type checkers see a backend's class here.
    ImplBase = object


@dataclass
class SparseMetadata:
    """One layer's metadata of a level 2 pass: a request is ``num_kv_heads`` one-head sequences."""

    sequences: PagedSequences
    query_len: int
    """Tokens of every request."""


@dataclass
class DirectMetadata:
    """Metadata of a pass of the draft over its private cache: a sequence per request."""

    sequences: PagedSequences


class _RetrievalImpl(ImplBase):
    """Mixin over a backend's implementation; ``attach`` makes the subclass."""

    layer_index: int | None
    recorder: Recorder | None
    offload: LayerOffload | None
    kernel: PagedKernel

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if self.offload is not None and isinstance(metadata_of(layer), SparseMetadata):
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
        if isinstance(attn_metadata, SparseMetadata | DirectMetadata):
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
        recorder, index = self.recorder, self.layer_index
        if attn_metadata is not None and recorder is not None and index is not None:
            recorder.record(index, query, attn_metadata)
        return super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )

    def _device_cache(self, kv_cache, metadata):
        """Return the device copy of a KV cache in host memory."""
        assert self.offload is not None
        if isinstance(metadata, SparseMetadata):
            return self.offload.pool
        if metadata is None:  # a profiling pass at start reads no KV cache
            return kv_cache
        return self.offload.stage(metadata.block_table, metadata.seq_lens)

    def _forward_paged(self, layer, query, kv_cache, metadata, output):
        if isinstance(metadata, SparseMetadata):
            return self._forward_sparse(layer, query, kv_cache, metadata, output)
        keys, values = key_and_value(kv_cache, self)
        type(self).kernel(layer, self, query, keys, values, metadata.sequences, output)
        return output

    def _forward_sparse(self, layer, query, kv_cache, metadata: SparseMetadata, output):
        num_tokens, heads = query.shape[0], self.num_kv_heads
        group = self.num_heads // heads
        length = metadata.query_len
        blocks = OneHeadBlocks.of(*key_and_value(kv_cache, self))
        result = output.view(num_tokens * heads, group, self.head_size)
        ordered = query.reshape(num_tokens * heads, group, self.head_size)
        target = result
        if length > 1:
            # A sequence's tokens lie together: [num_reqs, heads, length] from
            # [num_reqs, length, heads].
            ordered = ordered.unflatten(0, (-1, length, heads)).transpose(1, 2)
            ordered = ordered.reshape(num_tokens * heads, group, self.head_size)
            target = torch.empty_like(ordered, dtype=output.dtype)
        type(self).kernel(
            layer, self, ordered, blocks.key, blocks.value, metadata.sequences, target
        )
        if length > 1:
            by_token = target.unflatten(0, (-1, heads, length)).transpose(1, 2)
            result.unflatten(0, (-1, length, heads)).copy_(by_token)
        return output


def _quantize(
    exact: torch.Tensor,  # [num_tokens, num_heads * head_dim]
    scale: torch.Tensor,  # [1], float32
    output: torch.Tensor,  # the same shape, of 8 bits, written
) -> torch.Tensor:
    """Quantize attention's output as vLLM's kernels do (``fuse_attn_quant``)."""
    bounds = torch.finfo(output.dtype)
    return output.copy_((exact.float() / scale).clamp(bounds.min, bounds.max))


def attach(
    layer,
    layer_index: int | None,
    recorder: Recorder | None,
    offload: LayerOffload | None = None,
) -> None:
    """Replace a layer's implementation by a subclass of it, with the same settings.

    Args:
        layer_index: index among the layers that retrieve; None for a draft's layer, whose queries
            are not recorded.
        offload: the layer's KV cache, where it lies in host memory.

    Raises:
        ValueError: the attention backend is not supported.
    """
    impl_cls = type(layer.impl)
    backend, kernel = backend_of(layer.impl), kernel_for(layer.impl, layer.kv_cache.dtype)
    if backend is None or kernel is None:
        raise ValueError(
            f"attention backend with {impl_cls.__name__} is not one that TriForce knows; "
            "use --attention-backend FLASH_ATTN, FLASHINFER or TRITON_ATTN"
        )
    if offload is not None and backend.plans_on_host:
        raise ValueError(
            "kv_offload_gib with FLASHINFER, which vLLM chose here: its plans are not told of "
            "staged layers yet; use --attention-backend FLASH_ATTN or TRITON_ATTN"
        )
    subclass = type(
        f"Retrieval{impl_cls.__name__}",
        (_RetrievalImpl, impl_cls),
        {"kernel": staticmethod(kernel)},
    )
    replace_impl(layer, subclass, layer_index=layer_index, recorder=recorder, offload=offload)
