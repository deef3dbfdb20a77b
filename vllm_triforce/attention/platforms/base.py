"""Interface of a platform's attention, before it is loaded."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from vllm_triforce.attention.base import DraftAttention, RetrievalAttention

if TYPE_CHECKING:
    from vllm.platforms import Platform


class AttentionPlatform(ABC):
    """A kind of platform, and the attention classes of the levels there.

    The class is loaded on every platform, to check if it fits. Modules that only its own platform
    can load are imported inside ``retrieval()`` and ``draft()``.
    """

    name: ClassVar[str]
    """Name of its file."""
    platforms: ClassVar[tuple[str, ...]]
    """Names of its platforms, in messages to users of another."""

    @staticmethod
    @abstractmethod
    def fits(platform: "Platform") -> bool:
        """True if this is the attention for a platform of vLLM's."""

    @staticmethod
    @abstractmethod
    def retrieval() -> type[RetrievalAttention]:
        """Return level 2's attention; for Runner V1 it must be a ``RaggedRetrievalAttention``."""

    @staticmethod
    @abstractmethod
    def draft() -> type[DraftAttention]:
        """Return level 1's attention, for Runner V2."""
