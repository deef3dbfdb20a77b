"""Attention by platform. Modules that only its own platform can load are loaded there alone."""

from typing import NamedTuple

from vllm.platforms import Platform

from vllm_triforce.attention.base import DraftAttention, RetrievalAttention


class LevelAttention(NamedTuple):
    """Attention classes of the levels on a platform."""

    retrieval: type[RetrievalAttention]
    """Of level 2."""
    draft: type[DraftAttention]
    """Of level 1, for Runner V2."""


def attention_for(platform: Platform) -> LevelAttention:
    """Load the attention of a platform that ``config/checks.py`` accepts."""
    if platform.is_cpu():
        from vllm_triforce.attention.cpu import CPUDraftAttention, CPURetrievalAttention

        return LevelAttention(CPURetrievalAttention, CPUDraftAttention)
    from vllm_triforce.attention.gpu.draft import GPUDraftAttention
    from vllm_triforce.attention.gpu.retrieval import GPURetrievalAttention

    return LevelAttention(GPURetrievalAttention, GPUDraftAttention)
