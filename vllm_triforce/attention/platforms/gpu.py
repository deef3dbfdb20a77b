"""Attention on GPUs."""

from typing import TYPE_CHECKING

from vllm_triforce.attention.base import DraftAttention, RetrievalAttention
from vllm_triforce.attention.platforms.base import AttentionPlatform

if TYPE_CHECKING:
    from vllm.platforms import Platform


class GPUPlatform(AttentionPlatform):
    """Attention over vLLM's FLASH_ATTN, FLASHINFER and TRITON_ATTN, on Runner V2."""

    name = "gpu"
    platforms = ("CUDA", "ROCm")

    @staticmethod
    def fits(platform: "Platform") -> bool:
        return platform.is_cuda_alike()

    @staticmethod
    def retrieval() -> type[RetrievalAttention]:
        from vllm_triforce.attention.gpu.retrieval import GPURetrievalAttention

        return GPURetrievalAttention

    @staticmethod
    def draft() -> type[DraftAttention]:
        from vllm_triforce.attention.gpu.draft import GPUDraftAttention

        return GPUDraftAttention
