"""Queries of the full pass, kept for the next selection."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Recorder:
    """Recorder of each full pass's queries. This base keeps none, for engines that never select."""

    paused = False

    def record(
        self,
        layer: int,  # index among the layers that retrieve
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        metadata: Any,  # the backend's own, of a full pass
    ) -> None:
        """Record the queries of a layer."""

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Pause during passes other than the full pass."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class QueryRecorder(Recorder):
    """Newest queries of every request and retrieving layer.

    The last accepted token is determined only after the pass, so the last ``rows_per_request``
    rows of each request are kept.

    Args:
        num_layers: layers that retrieve.
        rows_per_request: ``num_speculative_tokens + 1``.
        min_context: tokens; nothing is kept while all requests are shorter.
    """

    def __init__(self, num_layers: int, rows_per_request: int, min_context: int) -> None:
        self.rows_per_request = rows_per_request
        self.min_context = min_context
        self._queries: list[torch.Tensor | None] = [None] * num_layers
        self._is_wanted = False
        self._ends: torch.Tensor
        """[num_reqs], row after the last one of each request."""
        self._rows: torch.Tensor | None = None
        """[num_reqs * rows_per_request], the rows that are kept; None for all rows of a small
        batch."""

    def record(self, layer: int, query: torch.Tensor, metadata: Any) -> None:
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
        """Return the queries of the token ``num_rejected`` before the request's last.

        Raises:
            RuntimeError: the pass was not recorded.
        """
        queries = [query for query in self._queries if query is not None]
        if len(queries) < len(self._queries):
            raise RuntimeError("no queries were recorded in the last full pass")
        if self._rows is None:
            row = int(self._ends[request]) - 1 - num_rejected
        else:
            row = request * self.rows_per_request + num_rejected
        return torch.stack([query[row] for query in queries])


class StaticQueryRecorder(Recorder):
    """One query of every request and retrieving layer, at addresses that CUDA graphs rely on.

    A decoding request keeps the query of the step's first token, a prefill that of the last. The
    first token is already accepted, so nothing waits for the outcome of the pass. To keep the last
    accepted token's query instead, every layer would have to keep those of all tokens of a step.
    That is ``max_decode_tokens`` times the memory and writes, in graphs of plain lengths too, for
    a query at most ``max_decode_tokens - 1`` tokens newer.

    A step after which nothing is selected keeps no queries (``expect``). A captured graph cannot
    switch, so graphs for plain decoding are captured without recording
    (``runner_v2/decode_graphs.py``).

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
        """Begin a step; ``selection`` is True if a selection follows it."""
        self._is_wanted = selection

    @property
    def is_recording(self) -> bool:
        """True if the queries of the next pass are kept."""
        return self._is_wanted and not self.paused

    def record(self, layer: int, query: torch.Tensor, metadata: Any) -> None:
        if not self.is_recording:
            return
        num_reqs = min(len(self._rows), len(query))
        if layer == 0:
            # A captured graph always records: it is replayed for batches of any length.
            max_seq_len = getattr(metadata, "max_seq_len", self.min_context)
            self._is_long_enough = max_seq_len >= self.min_context
            if self._is_long_enough:
                first, end = self._starts[:num_reqs], self._starts[1 : num_reqs + 1]
                rows = torch.where(end - first <= self._max_decode_tokens, first, end - 1)
                self._rows[:num_reqs] = rows.clamp(0, len(query) - 1)
        if self._is_long_enough:
            kept, rows = self.queries[layer, :num_reqs], self._rows[:num_reqs]
            if query.dtype == kept.dtype:
                torch.index_select(query, 0, rows, out=kept)
            else:  # quantized for an fp8 KV cache
                kept.copy_(query[rows])
