"""The target's hidden states that an EAGLE-3 head reads, for each request."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

# Steps without a draft after which a request's states are fused.
_MAX_PENDING = 64


@dataclass
class _States:
    """States of one request, known from position ``first`` to ``end - 1``."""

    first: int
    end: int
    pending: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """First position and states, [num_tokens, num_aux * hidden_size], oldest first."""
    fused: torch.Tensor | None = None
    """[capacity, hidden_size], a ring by position."""


class HiddenStates:
    """Keeps the states at the newest ``capacity`` positions of each request.

    They come from full passes, plain steps among them, and from passes of level 2. A later pass
    over a position replaces its state, so states of rejected drafts need no bookkeeping.

    Args:
        fuse: the head's projection of auxiliary states to its hidden size.
        capacity: positions that a window may need, and those of a proposal.
    """

    def __init__(
        self,
        fuse: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        capacity: int,
    ) -> None:
        self._fuse_states = fuse
        self._dtype = dtype
        self._capacity = capacity
        self._requests: dict[str, _States] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_ids: list[str],
        first_positions: list[int],
        lengths: list[int],
        aux: list[torch.Tensor],  # [num_tokens, hidden_size] of each auxiliary layer
    ) -> None:
        """Add the states of a full pass, whose tokens are those of the requests in turn."""
        for request_id, first in zip(request_ids, first_positions):
            if request_id not in self._requests:
                self._requests[request_id] = _States(first, first)
        self.replace(request_ids, first_positions, lengths, aux)

    def replace(
        self,
        request_ids: list[str],
        first_positions: list[int],
        lengths: list[int],
        aux: list[torch.Tensor],  # as of ``add()``
    ) -> None:
        """Add the states of a pass of requests that were added before; others are left out."""
        is_small = sum(lengths) <= self._capacity
        joined = torch.cat(aux, -1) if is_small else None
        begin = 0
        for request_id, first, length in zip(request_ids, first_positions, lengths):
            end, num_kept = first + length, min(length, self._capacity)
            rows = slice(begin + length - num_kept, begin + length)
            begin += length
            if (states := self._requests.get(request_id)) is None:
                continue
            if first > states.end:  # others were computed elsewhere
                states.first = first
            states.first, states.end = max(states.first, end - self._capacity), end
            kept = torch.cat([a[rows] for a in aux], -1) if joined is None else joined[rows]
            states.pending.append((end - num_kept, kept))
            if len(states.pending) > _MAX_PENDING:
                self._fuse(states)

    def first_known(self, request_id: str) -> int:
        """Return the first position from which on all states are known."""
        return self._requests[request_id].first

    def take(self, request_id: str, first: int, end: int) -> torch.Tensor:
        """Return the fused states at positions ``first`` to ``end - 1``, [num, hidden_size]."""
        states = self._requests[request_id]
        self._fuse(states)
        assert states.fused is not None
        return states.fused[self._places(first, end)]

    def _fuse(self, states: _States) -> None:
        """Fuse what is pending."""
        if not states.pending:
            return
        parts = [part for _, part in states.pending]
        fused = self._fuse_states(torch.cat(parts).to(self._dtype))
        if states.fused is None:
            states.fused = fused.new_zeros(self._capacity, fused.shape[1])
        for (first, part), rows in zip(states.pending, fused.split([len(part) for part in parts])):
            states.fused[self._places(first, first + len(part))] = rows
        states.pending.clear()

    def _places(self, first: int, end: int) -> torch.Tensor:
        """Return the rows of ``_States.fused`` of positions ``first`` to ``end - 1``."""
        return torch.arange(first, end) % self._capacity

    def add_zeros(self, request_id: str, end: int, num_aux: int, hidden_size: int) -> None:
        """Add the newest states of a dummy request with ``end`` tokens."""
        num_tokens = min(end, self._capacity)
        zeros = torch.zeros(num_tokens, hidden_size, dtype=self._dtype)
        self.add([request_id], [end - num_tokens], [num_tokens], [zeros] * num_aux)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forget all other requests."""
        for request_id in self._requests.keys() - set(request_ids):
            del self._requests[request_id]

    def release(self, request_id: str) -> None:
        """Forget a request that has left the engine, or whose id has a new owner."""
        self._requests.pop(request_id, None)
