"""The retrieval cache on the device: what level 2 reads of each row (paper, section 4.2).

The same policies and the same layout as ``cache/retrieval_cache.py``: the first chunk, the selected
ones, then everything from the recent blocks to the one being written.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.attention.base import RetrievalAttention
from vllm_triforce.cache.summaries import QuantizedSummaries
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.kernels.retrieval import build_sparse_tables, score_chunks
from vllm_triforce.kernels.row_table import Refresh, RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2
from vllm_triforce.runner_v2.slots import Slot
from vllm_triforce.selection import POLICIES
from vllm_triforce.selection.retrieval import RetrievalPolicy

# Policies whose votes a kernel counts; the others' own ``score()`` is asked.
_KERNELS = {RetrievalPolicy.name: score_chunks}

# Rows are scored together as long as what is made for it fits here.
_SCORE_BYTES = 128 << 20


class SelectionsV2:
    """Selections of all slots, and block tables of the rows in a proposal.

    Args:
        attention: the sparse mode of the platform's backend.
        queries: [num_layers, num_rows, num_heads, head_dim], the recorder's.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        attention: RetrievalAttention,
        queries: torch.Tensor,
        num_blocks: int,
        num_kv_heads: int,
        rows: Rows,
        num_slots: int,
        device: torch.device,
    ) -> None:
        num_layers, _, _, head_dim = queries.shape
        self.block_size = config.block_size
        self.recent_blocks = config.recent_blocks
        self.max_selected = config.budget_blocks - self.recent_blocks
        self._refresh_interval = config.refresh_interval
        self._policy = POLICIES[config.policy]()
        self._attention = attention
        self._queries = queries
        self._rows = rows
        self._max_growth = config.max_growth
        self.width = config.table_width
        # Head-major, so that one head's lie together.
        shape = (num_layers, num_kv_heads, num_blocks, head_dim)
        self.summaries = {
            kind: QuantizedSummaries.allocate(shape, device) for kind in self._policy.summaries
        }
        self._selected = torch.zeros(
            num_slots,
            num_layers,
            num_kv_heads,
            self.max_selected,
            dtype=torch.int32,
            device=device,
        )
        self.tables = torch.zeros(
            num_layers,
            rows.max_rows * num_kv_heads,
            self.width,
            dtype=torch.int32,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        of_summaries = sum(summaries.num_bytes for summaries in self.summaries.values())
        return of_summaries + self._selected.nbytes + self.tables.nbytes

    def schedule_refresh(self, slots: list[Slot], max_computed_tokens: np.ndarray) -> list[Refresh]:
        """For each row, whether its selection is due."""
        result = []
        for slot, newest in zip(slots, max_computed_tokens.tolist()):
            slot.age += 1
            is_due = slot.age >= self._refresh_interval
            is_due |= newest - slot.selected_at > self._max_growth
            if slot.is_new or is_due:
                slot.age, slot.selected_before, slot.selected_at = 0, slot.selected_at, newest
            refresh = Refresh.DUE if is_due else Refresh.NOT_DUE
            result.append(Refresh.NEW_OWNER if slot.is_new else refresh)
            slot.is_new = False
        return result

    def refresh(
        self,
        batch: BatchV2,
        table: torch.Tensor,  # [num_rows, width], the retrieving group's block tables
        slots: list[Slot],
        due: list[Refresh],
    ) -> None:
        """Selects for the rows that are due, and lays out the block tables of all."""
        rows, count = self._rows, self._rows.num_rows
        # Apart, so that the work is as much as is due: a new request has its whole context to
        # summarise, others a block or two.
        for kind in (Refresh.NEW_OWNER, Refresh.DUE):
            due_rows = [row for row, refresh in enumerate(due) if refresh == kind]
            if due_rows:
                self._refresh(batch, table, slots, due_rows, kind)
        build_sparse_tables(
            self.tables,
            self._selected,
            rows.column(RowColumn.SLOT),
            rows.num_selected[:count],
            rows.tail[:count],
            rows.num_blocks[:count],
            table,
            self._attention.head_strides(),
        )

    def _refresh(
        self, batch: BatchV2, table, slots: list[Slot], due_rows: list[int], kind: Refresh
    ) -> None:
        """Selects for some rows, for which it is due in the same way."""
        longest = max(int(batch.max_computed_tokens[row]) for row in due_rows)
        max_chunks = max(self.max_selected, longest // self.block_size)
        together = self._rows_at_a_time(max_chunks)
        for start in range(0, len(due_rows), together):
            part = due_rows[start : start + together]
            both = async_tensor_h2d([part, [slots[row].index for row in part]], table.device)
            some, own_slots = both
            own = table[some]
            if self.summaries:
                self._attention.update_summaries(
                    self.summaries,
                    own,
                    self._rows.first_newly_full[some],
                    self._rows.last_newly_full[some],
                    max(self._max_newly_full(slots[row], kind) for row in part),
                )
            self._selected[own_slots] = self._select(batch, own, some, max_chunks)

    def _max_newly_full(self, slot: Slot, refresh: Refresh) -> int:
        """Blocks that can have become full since the selection before this one; by other routes a
        request grows without one, as far as it likes."""
        before = 0 if refresh == Refresh.NEW_OWNER else slot.selected_before
        # What the host knew then may have been too much, by what was proposed and refused.
        return (slot.selected_at - before + self._max_growth) // self.block_size + 2

    def _select(self, batch, own, some: torch.Tensor, max_chunks: int) -> torch.Tensor:
        """Block ids of the best chunks, [len(some), num_layers, num_kv_heads, max_selected].

        Args:
            own: [len(some), width], the rows' block tables.
        """
        num_chunks = self._rows.tail[some]
        score = _KERNELS.get(self._policy.name, self._score)
        votes = score(
            self._queries,
            self._rows.column(RowColumn.BATCH_ROW)[some],
            self.summaries,
            own,
            num_chunks,
            max_chunks,
        )
        votes[..., 0] = float("inf")
        # Sorted: where there are fewer chunks than places, those that are none come last.
        chosen = votes.topk(self.max_selected, dim=-1, sorted=True).indices
        own = own[:, None, None].expand(-1, *self._selected.shape[1:3], -1)
        return own.gather(3, chosen.clamp_(max=own.shape[3] - 1))

    def _score(
        self, queries, query_rows, summaries, tables, num_chunks, max_chunks
    ) -> torch.Tensor:
        """By the policy itself, whichever it is; arguments and result as of ``score_chunks``, a
        kernel that does not copy what it reads."""
        places = torch.arange(max_chunks, device=tables.device)
        # A table may be shorter than the bound; what is past it is no candidate.
        blocks = tables[:, places.clamp(max=tables.shape[1] - 1)].long()
        outside = ~((places > 0) & (places < num_chunks[:, None]))[:, None, None]
        step = max(1, _SCORE_BYTES // (len(tables) * self._gathered_bytes(max_chunks)))
        votes = [
            self._layers_votes(
                queries[start : start + step, query_rows],
                {kind: keys.of_layers(start, start + step) for kind, keys in summaries.items()},
                blocks,
                outside,
            )
            for start in range(0, len(queries), step)
        ]
        return torch.cat(votes, dim=1).masked_fill_(outside, float("-inf"))

    def _layers_votes(self, queries, summaries, blocks, outside) -> torch.Tensor:
        """Votes of some layers, [num_reqs, num_layers, num_kv_heads, num_chunks]."""
        num_kv_heads, max_chunks = self._selected.shape[2], blocks.shape[1]
        grouped = queries.transpose(0, 1).unflatten(2, (num_kv_heads, -1))
        gathered = {
            kind: keys.of_blocks(blocks).permute(2, 0, 1, 3, 4) for kind, keys in summaries.items()
        }
        scores = self._policy.checked_score(grouped.float(), gathered, max_chunks)
        scores = scores.masked_fill(outside[:, :, :, None], float("-inf"))
        return self._policy.votes(scores, queries.shape[-1])

    def _gathered_bytes(self, max_chunks: int) -> int:
        """Of one layer's summaries of one row, twice as long as they are being made."""
        numbers = 2 * len(self.summaries) * self._selected.shape[2] * self._queries.shape[-1]
        return 4 * max(1, numbers) * max(1, max_chunks)

    def _rows_at_a_time(self, max_chunks: int) -> int:
        """Rows that are scored together, by the memory that it takes."""
        num_layers, _, num_heads, _ = self._queries.shape
        row_bytes = 4 * num_layers * num_heads * max(1, max_chunks)
        if self._policy.name not in _KERNELS:
            row_bytes = max(row_bytes, self._gathered_bytes(max_chunks))
        return max(1, _SCORE_BYTES // row_bytes)
