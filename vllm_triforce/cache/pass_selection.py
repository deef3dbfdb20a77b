"""Select inside level 2's passes: a layer reads the chunks that its own query scores highest.

Quest (arXiv 2406.10774, section 3.3) selects in this way for every decoded token. Here a selection
serves ``TOKENS_PER_SELECTION`` tokens of a proposal.

Only the newest settled token of a request votes, never the drafts that follow it in the pass: level
2 tests them, and a distribution that depends on the token it tests makes the test biased.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_triforce.cache.retrieval_cache import Selection
from vllm_triforce.selection import SelectionPolicy, Summary

TOKENS_PER_SELECTION = 4
"""Tokens of a proposal between two selections. A request also selects in the first pass."""


def may_select(num_rounds: int, max_round_tokens: int, max_tokens: int) -> bool:
    """Return True if any request of a batch can select in a pass of Runner V2.

    The host knows the rounds so far, and bounds of the tokens that they added.

    Args:
        num_rounds: rounds before the pass, each of 1 to ``max_round_tokens`` tokens.
        max_tokens: tokens of the longest proposal. A request that has all of its does not select.
    """
    if not num_rounds:
        return True
    longest = min(num_rounds * max_round_tokens, max_tokens - 1)
    return longest // TOKENS_PER_SELECTION > (num_rounds - 1) // TOKENS_PER_SELECTION


class PassSelection:
    """Chunks of a batch that each layer selects in passes of a proposal.

    Requests whose context fits the budget are left out: level 2 reads all of it.

    Args:
        selections: by row of the batch, one at least that has summaries.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        selections: Sequence[Selection],
        num_kv_heads: int,
    ) -> None:
        self._policy = policy
        self._num_kv_heads = num_kv_heads
        by_row = {row: s for row, s in enumerate(selections) if s.summaries is not None}
        self._batch_rows = list(by_row)
        num_selected = [s.num_before_tail - 1 for s in by_row.values()]
        block_ids = [torch.from_numpy(s.candidates.astype(np.int32)) for s in by_row.values()]
        num_chunks = list(map(len, block_ids))
        self._max_selected = max(num_selected)
        self._is_kept = _places_from(num_selected)
        """[num_rows, 1, max_selected], True for blocks of a row's tail; None where rows select
        equally many. A budget is a share of each row's context."""
        self._max_chunks = max(num_chunks)
        self._is_padded = _places_from(num_chunks)
        """[num_rows, 1, max_chunks]; None where rows have equally many candidates."""
        summaries = [s.summaries for s in selections if s.summaries is not None]
        self._summaries = _stack(summaries, self._max_chunks)
        """By kind, [num_layers, num_rows, num_kv_heads, max_chunks, head_dim]."""
        heads = torch.arange(num_kv_heads, dtype=torch.int32)[:, None]
        padded_ids = pad_sequence(block_ids, batch_first=True)
        self._one_head_ids = padded_ids[:, None] * num_kv_heads + heads
        """[num_rows, num_kv_heads, max_chunks], int32."""
        self._selected_at: dict[int, int] = {}
        """Tokens of a row's proposal at its last selection."""

    def begin_pass(
        self, rows: list[int], query_lens: list[int], lengths: list[int], tables: torch.Tensor
    ) -> bool:
        """Prepare a pass of some requests of the batch, ``query_lens[i]`` tokens for ``rows[i]``.

        Args:
            lengths: of ``rows``, tokens of the proposal so far.
            tables: [num_layers, len(rows), num_kv_heads, width], int32, level 2's block tables of
                ``rows``. ``select`` writes the selected blocks after the first one.

        Returns:
            False if none of them selects.
        """
        pass_rows = {row: i for i, row in enumerate(rows) if self._is_due(row, lengths[i])}
        present = [i for i, row in enumerate(self._batch_rows) if row in pass_rows]
        if not present:
            return False
        self._selected_at |= {row: lengths[i] for row, i in pass_rows.items()}
        self._tables = tables
        table_rows = [pass_rows[self._batch_rows[i]] for i in present]
        starts = [0, *accumulate(query_lens)]
        self._tokens = torch.tensor([starts[row] for row in table_rows])
        # A slice makes no copies.
        is_all = len(present) == len(self._batch_rows)
        self._present: slice | torch.Tensor = slice(None) if is_all else torch.tensor(present)
        is_whole_pass = table_rows == list(range(len(rows)))
        self._table_rows: slice | torch.Tensor = (
            slice(None) if is_whole_pass else torch.tensor(table_rows)
        )
        return True

    def renew(self) -> None:
        """Let each request select in its next pass."""
        self._selected_at.clear()

    def _is_due(self, row: int, length: int) -> bool:
        """Return True if a request selects when its proposal has ``length`` tokens."""
        before = self._selected_at.get(row)
        return before is None or length // TOKENS_PER_SELECTION > before // TOKENS_PER_SELECTION

    def select(
        self,
        layer: int,  # index among the layers that retrieve
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> None:
        """Write a layer's selected blocks into its block tables."""
        present = self._present
        grouped = query[self._tokens].unflatten(1, (self._num_kv_heads, -1))
        summaries = {kind: keys[layer][present] for kind, keys in self._summaries.items()}
        is_padded = None if self._is_padded is None else self._is_padded[present]
        # The best come first, so that a row's blocks have the same order in any batch.
        best = self._policy.best_chunks(
            grouped, summaries, self._max_chunks, self._max_selected, is_padded
        )
        ids = self._one_head_ids[present].gather(-1, best)
        selected = self._tables[layer, :, :, 1 : 1 + self._max_selected]
        if self._is_kept is not None:
            ids = torch.where(self._is_kept[present], selected[self._table_rows], ids)
        selected[self._table_rows] = ids


def _places_from(counts: list[int]) -> torch.Tensor | None:  # [num_rows, 1, max(counts)], bool
    """Return True for places from each row's count on; None where all counts are equal."""
    if len(set(counts)) == 1:
        return None
    return (torch.arange(max(counts)) >= torch.tensor(counts)[:, None])[:, None]


def _stack(
    summaries: list[dict[Summary, torch.Tensor]],  # each [num_layers, num_kv_heads, n, head_dim]
    max_chunks: int,
) -> dict[Summary, torch.Tensor]:  # [num_layers, num_rows, num_kv_heads, max_chunks, head_dim]
    """Stack the summaries of requests, padded with zeros."""
    if len(summaries) == 1:
        return {kind: keys[:, None] for kind, keys in summaries[0].items()}
    stacked = {}
    for kind, first in summaries[0].items():
        num_layers, num_kv_heads, _, head_dim = first.shape
        shape = (num_layers, len(summaries), num_kv_heads, max_chunks, head_dim)
        stacked[kind] = first.new_zeros(shape)
        for row, one in enumerate(summaries):
            stacked[kind][:, row, :, : one[kind].shape[2]] = one[kind]
    return stacked
