"""vLLM's attention backends for GPUs that TriForce supports.

One more backend is one more entry of ``supported_backends``, if it packs keys and values as the
others do (``key_and_value``).
"""

from dataclasses import dataclass

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_triforce.attention.gpu.paged_kernels import FlashAttention, PagedKernel, triton_attention


@dataclass(frozen=True)
class GPUBackend:
    """A backend of vLLM's, as it runs the full pass."""

    impl_cls: type
    builder_cls: type
    plans_on_host: bool = False
    """True if its metadata builder plans each pass on the host. A CUDA graph cannot hold such a
    plan, and offload's staged layers are unknown to it."""


def supported_backends() -> list[GPUBackend]:
    """Load the classes of the supported backends; FlashInfer may not be installed."""
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionImpl,
        FlashAttentionMetadataBuilder,
    )
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionImpl,
        TritonAttentionMetadataBuilder,
    )

    backends = [
        GPUBackend(FlashAttentionImpl, FlashAttentionMetadataBuilder),
        GPUBackend(TritonAttentionImpl, TritonAttentionMetadataBuilder),
    ]
    try:
        from vllm.v1.attention.backends.flashinfer import FlashInferImpl, FlashInferMetadataBuilder
    except ImportError:
        return backends
    return [*backends, GPUBackend(FlashInferImpl, FlashInferMetadataBuilder, plans_on_host=True)]


def backend_of(impl) -> GPUBackend | None:
    """Return the backend of a layer's implementation; None if it is not supported."""
    backends = supported_backends()
    return next((backend for backend in backends if backend.impl_cls is type(impl)), None)


def kernel_for(impl, dtype: torch.dtype) -> PagedKernel:
    """Choose the kernel of level 2 and of level 1's draft for a layer of a supported backend.

    FlashAttention is chosen wherever it reads the stored dtype, with any backend of the full pass:
    it splits a short query's keys over the GPU, and vLLM's Triton kernel does so for single tokens
    only.

    Args:
        dtype: of the KV cache.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

    version = None
    if isinstance(impl, FlashAttentionImpl):
        version = impl.vllm_flash_attn_version
    elif dtype.itemsize == 2 and FlashAttentionBackend.supports_head_size(impl.head_size):
        version = get_flash_attn_version(head_size=impl.head_size)
    return FlashAttention(version) if version in (2, 3) else triton_attention


def key_and_value(
    kv_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_dim]
    impl,
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_blocks, block_size, num_kv_heads, head_dim]
    """Split a layer's cache as all three backends pack it (vllm/v1/kv_cache_layout.py)."""
    if is_quantized_kv_cache(impl.kv_cache_dtype):
        kv_cache = kv_cache.view(current_platform.fp8_dtype())
    return kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
