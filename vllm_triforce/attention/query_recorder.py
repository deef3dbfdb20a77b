"""Keeps, of each full pass, the queries that the next selection may need."""

import torch


class QueryRecorder:
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
        self.paused = False
        self._queries: list[torch.Tensor | None] = [None] * num_layers
        self._rows: torch.Tensor | None = None

    def record(
        self,
        layer: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        metadata,  # the backend's own, of a full pass
    ) -> None:
        if self.paused:
            return
        query_start_loc, max_seq_len = metadata.query_start_loc, metadata.max_seq_len
        if layer == 0:
            self._rows = None
            if max_seq_len >= self.min_context:
                back = torch.arange(1, self.rows_per_request + 1, device=query.device)
                rows = query_start_loc[1:, None] - back
                self._rows = rows.clamp(min=query_start_loc[:-1, None]).flatten()
        self._queries[layer] = None if self._rows is None else query[self._rows]

    def last_accepted(
        self, request: int, num_rejected: int
    ) -> torch.Tensor:  # [num_layers, num_heads, head_dim]
        """Queries of the token at ``num_rejected`` before the end of the request's rows.

        Raises:
            RuntimeError: the pass was not recorded.
        """
        if any(query is None for query in self._queries):
            raise RuntimeError("no queries were recorded in the last full pass")
        row = request * self.rows_per_request + num_rejected
        return torch.stack([query[row] for query in self._queries])
