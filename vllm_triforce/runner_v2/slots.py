"""Which requests TriForce keeps something for between proposals, as far as the host knows it."""

from dataclasses import dataclass


@dataclass
class Slot:
    """One request's place in what is kept on the device."""

    index: int
    is_new: bool = True
    age: int = 0
    """Proposals since the last selection."""
    selected_at: int = 0
    """Upper bound of the tokens that there were at the last selection."""
    selected_before: int = 0
    """The same, of the selection before that."""
    window_start: int = 0
    """Index of the first recent token in level 1's window."""
    window_tokens: int = -1
    """Upper bound of the tokens that there were at the last proposal; -1: there is no window."""


class Slots:
    """Slots by request. A request that leaves the engine, or loses its blocks, releases its own."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._taken: dict[str, Slot] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._taken

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def request_ids(self) -> list[str]:
        return list(self._taken)

    def owners(self, indices: list[int]) -> list[str]:
        return [name for name, slot in self._taken.items() if slot.index in indices]

    def take(self, request_id: str) -> Slot:
        """The request's slot, given on first use; there must be one left."""
        if request_id not in self._taken:
            self._taken[request_id] = Slot(self._free.pop())
        return self._taken[request_id]

    def invalidate_windows(self, request_ids: set[str]) -> None:
        """A full pass of these requests is not followed by a proposal: their windows are behind."""
        for request_id in request_ids & self._taken.keys():
            self._taken[request_id].window_tokens = -1

    def release(self, request_id: str) -> None:
        slot = self._taken.pop(request_id, None)
        if slot is not None:
            self._free.append(slot.index)
