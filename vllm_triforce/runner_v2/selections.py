"""Retrieval cache on the device: the blocks that level 2 reads for each row (paper, section 4.2).

Policies and layout are those of ``cache/retrieval_cache.py``: the first chunk, the selected chunks,
then every block from the recent ones to the one being written.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.attention.base import RetrievalAttention
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.kernels.pass_selection import PassSelectionV2
from vllm_triforce.kernels.retrieval import build_sparse_tables, score_chunks
from vllm_triforce.kernels.row_table import Refresh, RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2, Slot
from vllm_triforce.selection import POLICIES, Summary
from vllm_triforce.selection.retrieval import RetrievalPolicy

# Kernels that score chunks, by policy; other policies use their ``score()``.
_SCORE_KERNELS = {RetrievalPolicy.name: score_chunks}

# Limit of temporary memory, which decides how many rows are scored together.
_MAX_SCORE_BYTES = 128 << 20


class SelectionsV2:
    """Selected blocks of all slots, and level 2's block tables of a proposal's rows.

    Args:
        attention: sparse attention of the platform.
        queries: [num_layers, num_rows, num_heads, head_dim], the recorder's buffer.
        block_tables: [max_rows, width], int32, buffer of a proposal's block tables.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        attention: RetrievalAttention,
        queries: torch.Tensor,
        num_blocks: int,
        num_kv_heads: int,
        rows: Rows,
        block_tables: torch.Tensor,
    ) -> None:
        num_layers, _, num_heads, head_dim = queries.shape
        device = queries.device
        self.block_size = config.block_size
        self.max_selected = config.max_selected_blocks
        self._refresh_interval = config.refresh_interval
        self.policy = POLICIES[config.policy]()
        self._attention = attention
        self._queries = queries
        self._rows = rows
        self._max_growth = config.max_growth
        self.width = config.table_width
        # Head-major, so that the summaries of one head are contiguous.
        shape = (num_layers, num_kv_heads, num_blocks, head_dim)
        self.summaries = {
            kind: QuantizedSummaries.allocate(shape, device) for kind in self.policy.summaries
        }
        num_slots = rows.max_rows if config.keeps_selections else 0
        shape = (num_slots, num_layers, num_kv_heads, self.max_selected)
        self._selected = torch.zeros(shape, dtype=torch.int32, device=device)
        tables_shape = (num_layers, rows.max_rows * num_kv_heads, self.width)
        self.tables = torch.zeros(tables_shape, dtype=torch.int32, device=device)
        self.in_pass: PassSelectionV2 | None = None
        """Set where the layers select inside level 2's passes."""
        if config.selects_in_pass:
            self.in_pass = PassSelectionV2(
                self.summaries[Summary.MEAN],
                rows,
                block_tables,
                self.tables,
                num_heads,
                config.gamma + 1,
                attention.head_strides(),
            )

    def schedule_refresh(self, slots: list[Slot], max_computed_tokens: np.ndarray) -> list[Refresh]:
        """Age the slots' selections by a proposal, and say which are due.

        Args:
            max_computed_tokens: [num_rows], upper bounds.

        Returns:
            A value for each row.
        """
        refreshes = []
        for slot, newest in zip(slots, max_computed_tokens.tolist()):
            slot.age += 1
            is_due = slot.age >= self._refresh_interval
            is_due |= newest - slot.selected_at > self._max_growth
            if slot.is_new or is_due:
                slot.age, slot.selected_before, slot.selected_at = 0, slot.selected_at, newest
            refresh = Refresh.DUE if is_due else Refresh.NOT_DUE
            refreshes.append(Refresh.NEW_OWNER if slot.is_new else refresh)
            slot.is_new = False
        return refreshes

    def refresh(
        self,
        batch: BatchV2,
        table: torch.Tensor,  # [num_rows, width], the retrieving group's block tables
        slots: list[Slot],
        refreshes: list[Refresh],
    ) -> None:
        """Select chunks for rows whose selection is due, and write all rows' block tables.

        Where the passes select, only summaries are computed here.
        """
        # New requests separately: they summarize their whole context, others a block or two.
        for kind in (Refresh.NEW_OWNER, Refresh.DUE):
            due_rows = [row for row, refresh in enumerate(refreshes) if refresh == kind]
            if due_rows:
                self._refresh_rows(batch, table, slots, due_rows, kind)
        head_strides = self._attention.head_strides()
        selected = self._selected if self.in_pass is None else None
        build_sparse_tables(self.tables, selected, self._rows, table, head_strides)

    def _refresh_rows(
        self, batch: BatchV2, table, slots: list[Slot], due_rows: list[int], kind: Refresh
    ) -> None:
        """Select chunks for rows of one kind of refresh.

        Args:
            table: [num_rows, width], as in ``refresh``.
        """
        max_tokens = max(int(batch.max_computed_tokens[row]) for row in due_rows)
        max_chunks = max(self.max_selected, max_tokens // self.block_size)
        rows_per_part = self._rows_per_part(max_chunks)
        for start in range(0, len(due_rows), rows_per_part):
            part = due_rows[start : start + rows_per_part]
            indices = async_tensor_h2d([part, [slots[row].index for row in part]], table.device)
            rows, slot_indices = indices
            tables = table[rows]
            if self.summaries:
                self._attention.update_summaries(
                    self.summaries,
                    tables,
                    self._rows.first_newly_full[rows],
                    self._rows.last_newly_full[rows],
                    max(self._max_newly_full(slots[row], kind) for row in part),
                )
            if self.in_pass is None:
                self._selected[slot_indices] = self._select(batch, tables, rows, max_chunks)

    def _max_newly_full(self, slot: Slot, refresh: Refresh) -> int:
        """Bound the number of blocks that filled since the previous selection.

        It follows from token counts, not from the interval: by other routes a request grows
        without selections.
        """
        tokens_before = 0 if refresh == Refresh.NEW_OWNER else slot.selected_before
        # tokens_before may be too large, by drafts that were rejected: hence max_growth.
        return (slot.selected_at - tokens_before + self._max_growth) // self.block_size + 2

    def _select(self, batch, tables, rows: torch.Tensor, max_chunks: int) -> torch.Tensor:
        """Return block ids of the best chunks, [len(rows), num_layers, num_kv_heads, max_selected].

        Args:
            tables: [len(rows), width], the rows' block tables.
        """
        num_chunks = self._rows.tail[rows]
        score = _SCORE_KERNELS.get(self.policy.name, self.score)
        votes = score(
            self._queries,
            self._rows.column(RowColumn.BATCH_ROW)[rows],
            self.summaries,
            tables,
            num_chunks,
            max_chunks,
        )
        votes[..., 0] = float("inf")
        # Sorted, so that invalid chunks come last where there are fewer chunks than places.
        chosen = votes.topk(self.max_selected, dim=-1, sorted=True).indices
        tables = tables[:, None, None].expand(-1, *self._selected.shape[1:3], -1)
        return tables.gather(3, chosen.clamp_(max=tables.shape[3] - 1))

    def score(self, queries, query_rows, summaries, tables, num_chunks, max_chunks) -> torch.Tensor:
        """Score chunks by the policy's ``score()``.

        Arguments and result are those of the kernel ``score_chunks``, which unlike this copies no
        summaries.
        """
        chunks = torch.arange(max_chunks, device=tables.device)
        # max_chunks may exceed the table's width; chunks past it are no candidates.
        blocks = tables[:, chunks.clamp(max=tables.shape[1] - 1)].long()
        outside = ~((chunks > 0) & (chunks < num_chunks[:, None]))[:, None, None]
        layers_per_part = max(
            1, _MAX_SCORE_BYTES // (len(tables) * self._gathered_bytes(max_chunks))
        )
        votes = [
            self._count_votes(
                queries[start : start + layers_per_part, query_rows],
                {
                    kind: keys.slice_layers(start, start + layers_per_part)
                    for kind, keys in summaries.items()
                },
                blocks,
                outside,
            )
            for start in range(0, len(queries), layers_per_part)
        ]
        return torch.cat(votes, dim=1).masked_fill_(outside, float("-inf"))

    def _count_votes(self, queries, summaries, blocks, outside) -> torch.Tensor:
        """Return votes of some layers, [num_reqs, num_layers, num_kv_heads, num_chunks]."""
        num_kv_heads, max_chunks = self._selected.shape[2], blocks.shape[1]
        grouped = queries.transpose(0, 1).unflatten(2, (num_kv_heads, -1))
        gathered = {
            kind: keys.dequantize(blocks).permute(2, 0, 1, 3, 4) for kind, keys in summaries.items()
        }
        scores = self.policy.checked_score(grouped.float(), gathered, max_chunks)
        scores = scores.masked_fill(outside[:, :, :, None], float("-inf"))
        return self.policy.votes(scores, queries.shape[-1])

    def _gathered_bytes(self, max_chunks: int) -> int:
        """Return the bytes of one layer's gathered summaries of one row, with a temporary copy."""
        numbers = 2 * len(self.summaries) * self._selected.shape[2] * self._queries.shape[-1]
        return 4 * max(1, numbers) * max(1, max_chunks)

    def _rows_per_part(self, max_chunks: int) -> int:
        """Return the number of rows that are scored together, as memory allows."""
        num_layers, _, num_heads, _ = self._queries.shape
        row_bytes = 4 * num_layers * num_heads * max(1, max_chunks)
        if self.policy.name not in _SCORE_KERNELS:
            row_bytes = max(row_bytes, self._gathered_bytes(max_chunks))
        return max(1, _MAX_SCORE_BYTES // row_bytes)
