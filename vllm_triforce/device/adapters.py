"""LoRA in level 2's passes, as far as the device side sees it."""

from collections.abc import Sequence
from typing import Protocol


class PassAdapters(Protocol):
    """The runner's side of it (``worker/v2/adapters.py``)."""

    @property
    def capture_cases(self) -> list[int]:
        """vLLM's numbers of active adapters: of each there are graphs."""
        ...

    def has_any(self, request_ids: Sequence[str]) -> bool:
        """Whether one of these requests has an adapter."""
        ...

    def begin_proposal(self, request_ids: Sequence[str], num_rows: int, query_len: int) -> None:
        """The passes to come are of these requests, a row each, padded to ``num_rows``."""
        ...

    def begin_capture(self, num_active: int, num_rows: int, query_len: int) -> None:
        """A pass of so many rows is captured next, with so many adapters."""
        ...
