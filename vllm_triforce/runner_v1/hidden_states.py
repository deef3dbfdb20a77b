"""The target's hidden states that a head reads, for each request."""

from collections.abc import Callable, Collection, Sequence

import torch

# Steps without a draft after which a request's states are fused.
_MAX_PENDING = 64


class RequestStates:
    """States of one request, known from position ``first`` to ``end - 1``."""

    def __init__(self, position: int, capacity: int) -> None:
        self.first = self.end = position
        self._capacity = capacity
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._fused: torch.Tensor | None = None
        """[capacity, hidden_size], a ring by position."""

    def add(self, first: int, length: int, kept: torch.Tensor) -> int:
        """Add a pass over ``length`` tokens; return how many passes are to be fused.

        Args:
            kept: those of the newest tokens, [num_kept, num_aux * hidden_size].
        """
        if first > self.end:  # those between were computed elsewhere
            self.first = first
        self.end = first + length
        self.first = max(self.first, self.end - self._capacity)
        self._pending.append((self.end - len(kept), kept))
        # Chunks of a long prompt, older than the ring.
        self._pending = [p for p in self._pending if p[0] + len(p[1]) > self.first]
        return len(self._pending)

    def fused(self, fuse: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Fuse what is pending, and return the ring."""
        parts = [part for _, part in self._pending]
        if parts:
            fused = fuse(torch.cat(parts))
            if self._fused is None:
                self._fused = fused.new_zeros(self._capacity, fused.shape[1])
            rows = fused.split([len(part) for part in parts])
            for (first, part), states in zip(self._pending, rows):
                self._fused[torch.arange(first, first + len(part)) % self._capacity] = states
            self._pending.clear()
        assert self._fused is not None
        return self._fused


class HiddenStates:
    """Keeps the states at the newest ``capacity`` positions of each request.

    They come from full passes, plain steps among them, and from passes of level 2. A later pass
    over a position replaces its state, so states of rejected drafts need no bookkeeping.

    Args:
        fuse: projects a token's states to what the head reads (``core/head.py``).
        capacity: positions that a window may need, and those of a proposal.
    """

    def __init__(
        self,
        fuse: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        capacity: int,
    ) -> None:
        self._dtype = dtype
        self._fuse = lambda states: fuse(states.to(dtype))
        self._capacity = capacity
        self._requests: dict[str, RequestStates] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_ids: list[str],
        first_positions: list[int],
        lengths: list[int],
        aux: Sequence[torch.Tensor],  # [num_tokens, hidden_size] of each layer
    ) -> None:
        """Add the states of a full pass, whose tokens are those of the requests in turn."""
        for request_id, first in zip(request_ids, first_positions):
            if request_id not in self._requests:
                self._requests[request_id] = RequestStates(first, self._capacity)
        self.replace(request_ids, first_positions, lengths, aux)

    def replace(
        self,
        request_ids: list[str],
        first_positions: list[int],
        lengths: list[int],
        aux: Sequence[torch.Tensor],  # as of ``add()``
    ) -> None:
        """Add the states of a pass of requests that were added before; others are left out."""
        is_small = sum(lengths) <= self._capacity
        joined = torch.cat(list(aux), -1) if is_small else None
        begin = 0
        for request_id, first, length in zip(request_ids, first_positions, lengths):
            num_kept = min(length, self._capacity)
            rows = slice(begin + length - num_kept, begin + length)
            begin += length
            if (states := self._requests.get(request_id)) is None:
                continue
            kept = torch.cat([a[rows] for a in aux], -1) if joined is None else joined[rows]
            if states.add(first, length, kept) > _MAX_PENDING:
                states.fused(self._fuse)

    def first_known(self, request_id: str) -> int:
        """Return the first position from which on all states are known."""
        return self._requests[request_id].first

    def take(self, request_id: str, first: int, end: int) -> torch.Tensor:
        """Return the fused states at positions ``first`` to ``end - 1``, [num, hidden_size]."""
        ring = self._requests[request_id].fused(self._fuse)
        return ring[torch.arange(first, end) % self._capacity]

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


class StatesOfSteps:
    """Adds the states of the runner's full passes.

    Args:
        runner: vLLM's ``GPUModelRunner``.
    """

    def __init__(self, runner, states: HiddenStates) -> None:
        self._runner = runner
        self._states = states

    def __call__(self, scheduler_output, aux: Sequence[torch.Tensor]) -> None:
        """Add the states of a step.

        Args:
            aux: [num_tokens, hidden_size] of each layer.
        """
        for request in scheduler_output.scheduled_new_reqs:
            self._states.release(request.req_id)
        batch, scheduled = self._runner.input_batch, scheduler_output.num_scheduled_tokens
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        self._states.add(batch.req_ids, computed, [scheduled[name] for name in batch.req_ids], aux)

    def forget_finished(self) -> None:
        """Forget requests that have left the runner."""
        self._states.keep(self._runner.requests)
