"""Attention by platform. Modules that only its own platform can load are loaded there alone."""

from abc import ABC, abstractmethod
from typing import ClassVar

from vllm.platforms import Platform

from vllm_triforce.attention.base import (
    DraftAttention,
    RaggedRetrievalAttention,
    RetrievalAttention,
)


class AttentionPlatform(ABC):
    """A kind of platform, and the attention classes of the levels there."""

    name: ClassVar[str]
    """Name of the module or package with the classes."""
    platforms: ClassVar[tuple[str, ...]]
    """Names of its platforms, in messages to users of another."""

    @staticmethod
    @abstractmethod
    def fits(platform: Platform) -> bool:
        """True if this is the attention for a platform of vLLM's."""

    @staticmethod
    @abstractmethod
    def retrieval() -> type[RetrievalAttention]:
        """Return level 2's attention; for Runner V1 it must be a ``RaggedRetrievalAttention``."""

    @staticmethod
    @abstractmethod
    def draft() -> type[DraftAttention]:
        """Return level 1's attention, for Runner V2."""


class CPUPlatform(AttentionPlatform):
    """Attention over vLLM's CPU_ATTN, on both runners."""

    name = "cpu"
    platforms = ("a CPU",)

    @staticmethod
    def fits(platform: Platform) -> bool:
        return platform.is_cpu()

    @staticmethod
    def retrieval() -> type[RaggedRetrievalAttention]:
        from vllm_triforce.attention.cpu import CPURetrievalAttention

        return CPURetrievalAttention

    @staticmethod
    def draft() -> type[DraftAttention]:
        from vllm_triforce.attention.cpu import CPUDraftAttention

        return CPUDraftAttention


class GPUPlatform(AttentionPlatform):
    """Attention over vLLM's FLASH_ATTN, FLASHINFER and TRITON_ATTN, on Runner V2."""

    name = "gpu"
    platforms = ("CUDA", "ROCm")

    @staticmethod
    def fits(platform: Platform) -> bool:
        return platform.is_cuda_alike()

    @staticmethod
    def retrieval() -> type[RetrievalAttention]:
        from vllm_triforce.attention.gpu.retrieval import GPURetrievalAttention

        return GPURetrievalAttention

    @staticmethod
    def draft() -> type[DraftAttention]:
        from vllm_triforce.attention.gpu.draft import GPUDraftAttention

        return GPUDraftAttention


_ALL: tuple[type[AttentionPlatform], ...] = (CPUPlatform, GPUPlatform)
BACKENDS = {backend.name: backend for backend in _ALL}


def platform_for(platform: Platform) -> type[AttentionPlatform]:
    """Return the attention that fits a platform; a subclass goes before its base.

    Raises:
        ValueError: none fits, or several do, or a class does not name its platforms.
    """
    for backend in BACKENDS.values():
        names = getattr(backend, "platforms", None)
        if not names or not isinstance(names, tuple):
            raise ValueError(
                f"{backend.__module__}.{backend.__qualname__} has platforms = {names!r}: give it "
                "the names of its platforms as a tuple, such as ('CUDA',)"
            )
    fitting = [backend for backend in BACKENDS.values() if backend.fits(platform)]
    candidates = [
        backend
        for backend in fitting
        if not any(issubclass(other, backend) for other in fitting if other is not backend)
    ]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ValueError(
            f"platform {platform.device_name!r} has several attention backends, "
            f"{' and '.join(repr(backend.name) for backend in candidates)}; let fits() of one say "
            "no, or make one a subclass of the other"
        )
    *others, last = sorted(name for backend in BACKENDS.values() for name in backend.platforms)
    raise ValueError(
        f"TriForce has no sparse attention for platform {platform.device_name!r} yet; use vLLM on "
        f"{', '.join(others)} or {last}, or another speculative method"
    )
