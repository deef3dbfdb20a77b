"""The target's hidden states that a head reads, for each request."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_triforce.cache.allocation import checked_allocation

# Tokens whose states are fused together. States before fusion are several times as large.
_MAX_PENDING = 64


@dataclass
class _Place:
    """States of one request, known from position ``first`` to ``end - 1``."""

    index: int
    first: int = 0
    end: int = 0

    def extend(self, first: int, end: int, oldest: int) -> range:
        """Add a pass over positions ``first`` to ``end - 1``, and return those to keep.

        Args:
            oldest: first position that is of use.
        """
        if not self.first <= first <= self.end:  # those between were computed elsewhere
            self.first = first
        self.end = end
        self.first = max(self.first, min(end, oldest))
        return range(max(first, self.first), end)


class HiddenStates:
    """Keeps the states at the newest ``capacity`` positions of at most ``max_requests`` requests.

    They come from full passes, plain steps among them, and from passes of level 2. A later pass
    over a position replaces its state, so states of rejected drafts need no bookkeeping.

    Args:
        fuse: projects a token's states to the head's input (``core/head.py``).
        dtype: of the states before and after it.
        capacity: positions that a window may need, and those of a proposal.
        hidden_size: numbers of a fused state.
    """

    def __init__(
        self,
        fuse: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        capacity: int,
        hidden_size: int,
        max_requests: int,
    ) -> None:
        self._dtype = dtype
        self._fuse = fuse
        self._capacity = capacity
        shape = max_requests * capacity, hidden_size
        with checked_allocation(
            f"the head's states of {max_requests} requests",
            shape[0] * shape[1] * dtype.itemsize,
            torch.device("cpu"),
            "lower max_speculating_seqs or num_recent_tokens",
        ):
            self._rings = torch.empty(shape, dtype=dtype)
        """A ring by position for each place."""
        self._free = list(range(max_requests))[::-1]
        self._places: dict[str, _Place] = {}
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows of ``_rings``, [num_tokens], and the states before fusion that belong there."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def hold(self, request_ids: Sequence[str]) -> None:
        """Keep states of these requests, at most ``max_requests``, from their next pass on.

        Other requests keep theirs as long as there is room.
        """
        for request_id in request_ids:
            if request_id in self._places:
                continue
            if not self._free:
                wanted = set(request_ids)
                self.release(
                    next(request_id for request_id in self._places if request_id not in wanted)
                )
            self._places[request_id] = _Place(self._free.pop())

    def add(
        self,
        request_ids: Sequence[str],
        first_positions: Sequence[int],
        lengths: Sequence[int],
        aux: Sequence[torch.Tensor],  # [num_tokens, hidden_size] of each layer
        num_tokens: Sequence[int] | None = None,
    ) -> None:
        """Add the states of a pass, whose tokens are those of the requests in turn.

        Requests that are not held are left out.

        Args:
            num_tokens: tokens that each request has; a pass may be over a chunk of a prompt whose
                states a later chunk makes superfluous.
        """
        rows: list[int] = []
        places: list[int] = []
        begin = 0
        for i, (request_id, first, length) in enumerate(zip(request_ids, first_positions, lengths)):
            begin += length
            if (place := self._places.get(request_id)) is None:
                continue
            end = first + length
            newest = end if num_tokens is None else max(end, num_tokens[i])
            kept = place.extend(first, end, newest - self._capacity)
            rows += range(begin - len(kept), begin)
            places += [place.index * self._capacity + p % self._capacity for p in kept]
        if not rows:
            return
        index = torch.tensor(rows)
        self._pending.append((torch.tensor(places), torch.cat([a[index] for a in aux], -1)))
        if sum(len(part) for part, _ in self._pending) > _MAX_PENDING:
            self._fuse_pending()

    def _fuse_pending(self) -> None:
        if self._pending:
            places, states = zip(*self._pending)
            self._pending = []
            fused = self._fuse(torch.cat(states).to(self._dtype)).to(self._dtype)
            for index, part in zip(places, fused.split([len(index) for index in places])):
                self._rings[index] = part  # in turn: a later pass may be over the same positions

    def first_known(self, request_id: str) -> int:
        """Return the first position from which on all states are known."""
        return self._places[request_id].first

    def take(self, request_id: str, first: int, end: int) -> torch.Tensor:
        """Return the fused states at positions ``first`` to ``end - 1``, [num, hidden_size]."""
        self._fuse_pending()
        start = self._places[request_id].index * self._capacity
        return self._rings[start + torch.arange(first, end) % self._capacity]

    def add_zeros(self, request_id: str, end: int, num_aux: int, hidden_size: int) -> None:
        """Add the newest states of a dummy request with ``end`` tokens."""
        num_tokens = min(end, self._capacity)
        zeros = torch.zeros(num_tokens, hidden_size, dtype=self._dtype)
        self.hold([request_id])
        self.add([request_id], [end - num_tokens], [num_tokens], [zeros] * num_aux)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forget all other requests."""
        for request_id in [
            request_id for request_id in self._places if request_id not in request_ids
        ]:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request that has left the engine, or whose id has a new owner."""
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place.index)


class StatesOfSteps:
    """Adds the states of the runner's full passes, of requests that may be speculated on.

    Args:
        runner: vLLM's ``GPUModelRunner``.
        choose: returns the rows of the batch whose states are kept.
    """

    def __init__(self, runner, states: HiddenStates, choose: Callable[[], list[int]]) -> None:
        self._runner = runner
        self._states = states
        self._choose = choose

    def __call__(self, scheduler_output, aux: Sequence[torch.Tensor]) -> None:
        """Add the states of a step.

        Args:
            aux: [num_tokens, hidden_size] of each layer.
        """
        for request in scheduler_output.scheduled_new_reqs:
            self._states.release(request.req_id)
        batch, scheduled = self._runner.input_batch, scheduler_output.num_scheduled_tokens
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        self._states.hold([batch.req_ids[row] for row in self._choose()])
        requests = [self._runner.requests[request_id] for request_id in batch.req_ids]
        self._states.add(
            batch.req_ids,
            computed,
            [scheduled[request_id] for request_id in batch.req_ids],
            aux,
            [request.num_tokens for request in requests],
        )

    def forget_finished(self) -> None:
        """Forget requests that have left the runner."""
        self._states.keep(self._runner.requests)
