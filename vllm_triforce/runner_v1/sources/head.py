"""EAGLE-3 head (arXiv 2503.01840) or MTP layer over a window of recent tokens."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.cache.streaming import StateWindow
from vllm_triforce.core.models import fusion_of, num_states
from vllm_triforce.runner_v1.sources.draft_model import ALWAYS, DraftModel, Feed
from vllm_triforce.runner_v1.sources.source import Match, SourceParts

# Tokens whose states are fused together. States before fusion are several times as large.
_MAX_PENDING = 64


@dataclass
class _Place:
    """States of one request, known from position ``first`` to ``end - 1``."""

    index: int
    first: int = 0
    end: int = 0

    def extend(self, first: int, end: int, oldest: int) -> range:
        """Add a pass over positions ``first`` to ``end - 1``; return those from ``oldest`` on."""
        if not self.first <= first <= self.end:  # those between were computed elsewhere
            self.first = first
        self.end = end
        self.first = max(self.first, min(end, oldest))
        return range(max(first, self.first), end)


class HiddenStates:
    """Keeps the target's states of ``max_requests`` requests, at the newest positions of each.

    They come from full passes, plain steps among them, and from passes of level 2. A later pass
    over a position replaces its state, so states of rejected drafts need no bookkeeping.

    Args:
        fuse: projects a token's states to the head's input (``core/models.py``).
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

    def hold(self, request_ids: Sequence[str]) -> None:
        """Keep states of these requests from their next pass on, of others while there is room."""
        for request_id in request_ids:
            if request_id in self._places:
                continue
            if not self._free:
                self.release(next(held for held in self._places if held not in request_ids))
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

    def keep(self, request_ids: Container[str]) -> None:
        """Forget all other requests."""
        for request_id in [held for held in self._places if held not in request_ids]:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request that has left the engine, or whose id has a new owner."""
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place.index)


class Head(DraftModel):
    """Drafts with a head that reads the target's hidden states beside the tokens.

    The states of a prefix from the prefix cache are unknown, so the window begins after it. The
    same holds for tokens computed while more than ``max_speculating_seqs`` requests ran.
    """

    name = "head"
    prior_acceptance = (0.5,)

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts)
        vllm_config = parts.vllm_config
        self.states = HiddenStates(
            fusion_of(parts.draft),
            vllm_config.model_config.dtype,
            parts.config.state_capacity,
            vllm_config.speculative_config.draft_model_config.get_hidden_size(),
            self.cache.num_free_slots,
        )
        """Filled by the runner, from full passes and from those of level 2."""

    def find_matches(self, batch, proposal, rows) -> list[Match | None]:
        return [ALWAYS if batch.request_ids[row] in self.states else None for row in rows]

    def _new_window(self) -> StateWindow:
        return StateWindow(self._config.num_recent_tokens, self._config.window_tokens)

    def _advance(self, batch, proposal, row: int, num_drafts: int) -> Feed:
        request_id, token_ids = batch.request_ids[row], batch.context(proposal, row)
        window = self._windows[request_id]
        assert isinstance(window, StateWindow)
        position, first = window.advance_to(
            token_ids,
            num_drafts,
            batch.num_computed_tokens[row],
            self.states.first_known(request_id),
        )
        states = self.states.take(request_id, first - 1, len(token_ids) - 1)
        # The states of placeholders are those of their images.
        return Feed(token_ids[first:].clip(min=0).tolist(), position, states)

    def _processed(self, logits, batch):
        """Make rows uniform that allow no token of the head's vocabulary.

        Such rows have no distribution. Drafts of any other are verified correctly.
        """
        if not batch.logits_processors:
            return logits
        has_none = logits.amax(-1, keepdim=True) == float("-inf")
        return logits.masked_fill(has_none, 0.0)

    def prepare_dummy(self, batch) -> None:
        config, count = self.model.config, num_states(self._vllm_config)
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        for request_id, num_computed in zip(batch.request_ids, batch.num_computed_tokens):
            self.states.add_zeros(request_id, num_computed, count, width)

    @property
    def num_requests(self) -> int:
        return max(super().num_requests, len(self.states))

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.states.release(request_id)
