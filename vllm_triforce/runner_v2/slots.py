"""Slots of requests in the device's buffers, as the host knows them."""

from collections.abc import Container
from dataclasses import dataclass


@dataclass
class Slot:
    """One request's slot in buffers that last between proposals."""

    index: int
    is_new: bool = True
    age: int = 0
    """Proposals since the last selection."""
    selected_at: int = 0
    """Upper bound of the request's tokens at the last selection."""
    selected_before: int = 0
    """Upper bound of the request's tokens at the selection before that."""
    window_start: int = 0
    """Index of the first recent token in level 1's window."""
    first_known: int = 0
    """First position whose hidden state a head may read."""
    has_proposed: bool = False
    """False while it only keeps hidden states for the head."""
    num_read: int = -1
    """Tokens of the prompt that were read with this slot; -1 where none were."""
    window_tokens: int = -1
    """Upper bound of the request's tokens at the last proposal; -1 if the window is invalid."""


class Slots:
    """Slots by request, released when a request leaves the engine or loses its blocks."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, Slot] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def request_ids(self) -> list[str]:
        return list(self._slots)

    def owners(self, indices: list[int]) -> list[str]:
        return [request_id for request_id, slot in self._slots.items() if slot.index in indices]

    def take(self, request_id: str) -> Slot:
        """Return the request's slot, assigning a free one on first use; there must be one."""
        if request_id not in self._slots:
            self._slots[request_id] = Slot(self._free.pop())
        return self._slots[request_id]

    def release_without_proposal(self, count: int, kept: Container[str]) -> None:
        """Release at most ``count`` slots that only keep hidden states, except ``kept``."""
        idle = [r for r, slot in self._slots.items() if not slot.has_proposed and r not in kept]
        for request_id in idle[: max(0, count)]:
            self.release(request_id)

    def invalidate_windows(self, request_ids: set[str]) -> None:
        """Invalidate the windows of requests whose full pass no proposal follows."""
        for request_id in request_ids & self._slots.keys():
            self._slots[request_id].window_tokens = -1

    def release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot.index)
