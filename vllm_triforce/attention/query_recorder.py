"""Keeps, of each full pass, the queries that the next selection may need."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """What a layer's implementation tells the queries of each full pass."""

    paused: bool

    def record(
        self,
        layer: int,  # place among the layers that retrieve
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        metadata: Any,  # the backend's own, of a full pass
    ) -> None: ...


class _Pausable:
    """A recorder that need not listen."""

    paused = False

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Around passes whose queries are not the full pass's."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class NullRecorder:
    """Where nobody selects."""

    paused = True

    def record(self, layer: int, query: torch.Tensor, metadata: Any) -> None:
        pass


class QueryRecorder(_Pausable):
    """The newest queries of every request and retrieving layer.

    Which draft token is the last accepted one is known only after the pass, so the last
    ``rows_per_request`` rows of each request are kept.

    Args:
        num_layers: layers that retrieve.
        rows_per_request: ``num_speculative_tokens + 1``.
        min_context: the batch is ignored while no request is this long, in tokens.
    """

    def __init__(self, num_layers: int, rows_per_request: int, min_context: int) -> None:
        self.rows_per_request = rows_per_request
        self.min_context = min_context
        self._queries: list[torch.Tensor | None] = [None] * num_layers
        self._is_wanted = False
        self._ends: torch.Tensor | None = None
        """[num_reqs], row after the last one of each request."""
        self._rows: torch.Tensor | None = None
        """[num_reqs * rows_per_request], the rows that are kept; None for all, where they are no
        more than these."""

    def record(
        self,
        layer: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        metadata,  # the backend's own, of a full pass
    ) -> None:
        if self.paused:
            return
        if layer == 0:
            starts = metadata.query_start_loc
            self._is_wanted = metadata.max_seq_len >= self.min_context
            self._rows, self._ends = None, starts[1:]
            if self._is_wanted and len(query) > self.rows_per_request * len(self._ends):
                back = torch.arange(1, self.rows_per_request + 1, device=query.device)
                rows = self._ends[:, None] - back
                self._rows = rows.clamp(min=starts[:-1, None]).flatten()
        if not self._is_wanted:
            self._queries[layer] = None
        elif self._rows is None:
            self._queries[layer] = query.clone()
        else:
            self._queries[layer] = query[self._rows]

    def last_accepted(
        self, request: int, num_rejected: int
    ) -> torch.Tensor:  # [num_layers, num_heads, head_dim]
        """Queries of the token at ``num_rejected`` before the end of the request's rows.

        Raises:
            RuntimeError: the pass was not recorded.
        """
        if any(query is None for query in self._queries):
            raise RuntimeError("no queries were recorded in the last full pass")
        if self._rows is None:
            row = int(self._ends[request]) - 1 - num_rejected
        else:
            row = request * self.rows_per_request + num_rejected
        return torch.stack([query[row] for query in self._queries])


class StaticQueryRecorder(_Pausable):
    """One query of every request and retrieving layer, at addresses that CUDA graphs rely on.

    Of a request that decodes it is the query of the first token of its step: the newest token
    that is accepted for certain, so that nothing waits for the outcome of the pass. Of one that
    is being read, it is the last token's. Which token is the last accepted one is known when the
    pass is over: to have its query, those of all tokens of a step would have to be kept, which is
    ``max_decode_tokens`` times the memory and the writing in every layer, in graphs of plain
    lengths too, for a query that is at most ``max_decode_tokens - 1`` tokens newer.

    Nothing is kept in a step behind which nobody selects, as ``expect`` says. A captured graph does
    not hear of it: those for plain decoding are captured without (``runner_v2/decode_graphs.py``).

    Args:
        query_start_loc: [max_num_reqs + 1], int32, the runner's own buffer.
        max_reqs: first requests of a batch whose queries are kept.
        num_heads: query heads of a layer.
        max_decode_tokens: ``num_speculative_tokens + 1``.
    """

    def __init__(
        self,
        num_layers: int,
        query_start_loc: torch.Tensor,
        max_reqs: int,
        num_heads: int,
        head_dim: int,
        max_decode_tokens: int,
        min_context: int,
        dtype: torch.dtype,
    ) -> None:
        self.min_context = min_context
        self._starts = query_start_loc
        self._max_decode_tokens = max_decode_tokens
        device = query_start_loc.device
        num_reqs = min(max_reqs, len(query_start_loc) - 1)
        self._rows = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        self.queries = torch.zeros(
            num_layers, num_reqs, num_heads, head_dim, dtype=dtype, device=device
        )
        self._is_wanted = True
        self._is_long_enough = True

    def expect(self, selection: bool) -> None:
        """A step begins: whether somebody selects behind it."""
        self._is_wanted = selection

    @property
    def is_recording(self) -> bool:
        """Whether the queries of the next pass are to be kept."""
        return self._is_wanted and not self.paused

    def record(
        self,
        layer: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        metadata,  # the backend's own, of a full pass
    ) -> None:
        if not self.is_recording:
            return
        num_reqs = min(len(self._rows), len(query))
        if layer == 0:
            # A captured graph always records: it is replayed for batches of any length.
            longest = getattr(metadata, "max_seq_len", self.min_context)
            self._is_long_enough = longest >= self.min_context
            if self._is_long_enough:
                first, end = self._starts[:num_reqs], self._starts[1 : num_reqs + 1]
                rows = torch.where(end - first <= self._max_decode_tokens, first, end - 1)
                self._rows[:num_reqs] = rows.clamp(0, len(query) - 1)
        if self._is_long_enough:
            to, rows = self.queries[layer, :num_reqs], self._rows[:num_reqs]
            if query.dtype == to.dtype:
                torch.index_select(query, 0, rows, out=to)
            else:  # quantized for an fp8 KV cache
                to.copy_(query[rows])
