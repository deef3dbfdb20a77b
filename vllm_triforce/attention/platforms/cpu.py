"""Attention on CPUs."""

from typing import TYPE_CHECKING

from vllm_triforce.attention.base import DraftAttention, RaggedRetrievalAttention
from vllm_triforce.attention.platforms.base import AttentionPlatform

if TYPE_CHECKING:
    from vllm.platforms import Platform


class CPUPlatform(AttentionPlatform):
    """Attention over vLLM's CPU_ATTN, on both runners."""

    name = "cpu"
    platforms = ("a CPU",)

    @staticmethod
    def fits(platform: "Platform") -> bool:
        return platform.is_cpu()

    @staticmethod
    def retrieval() -> type[RaggedRetrievalAttention]:
        from vllm_triforce.attention.cpu.retrieval import CPURetrievalAttention

        return CPURetrievalAttention

    @staticmethod
    def draft() -> type[DraftAttention]:
        from vllm_triforce.attention.cpu.draft import CPUDraftAttention

        return CPUDraftAttention
