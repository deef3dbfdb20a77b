"""What an attention backend says of itself."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from vllm_triforce.attention.base import DraftAttention, RetrievalAttention

if TYPE_CHECKING:
    from vllm.platforms import Platform


class AttentionPlatform(ABC):
    """A kind of platform, and the classes that the levels' attention is made of there.

    It is loaded on every platform, to be asked whether it fits. What only its own platform can
    load is imported inside ``retrieval()`` and ``draft()``.
    """

    name: ClassVar[str]
    """The file's."""
    platforms: ClassVar[tuple[str, ...]]
    """As a message names them to users of another platform."""

    @staticmethod
    @abstractmethod
    def fits(platform: "Platform") -> bool:
        """Whether it is the backend for a platform of vLLM's."""

    @staticmethod
    @abstractmethod
    def retrieval() -> type[RetrievalAttention]:
        """Level 2's attention; a ``RaggedRetrievalAttention`` where Runner V1 is to run."""

    @staticmethod
    @abstractmethod
    def draft() -> type[DraftAttention]:
        """Level 1's, for Runner V2."""
