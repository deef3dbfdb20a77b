"""The retrieval cache on the device: what level 2 reads of each row (paper, section 4.2).

The same policy and the same layout as ``cache/retrieval_cache.py``: the first chunk, the selected
ones, then everything from the recent blocks to the one being written.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.triforce_config import SELECTIONS_ON_DEVICE
from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.slots import Slot
from vllm_triforce.kernels.chunk_scores import rows_at_a_time, score_chunks
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.sparse_tables import build_sparse_tables


class DeviceSelections:
    """Selections of all slots, and block tables of the rows in a proposal.

    Args:
        attention: the sparse mode of the platform's backend.
        queries: [num_layers, num_rows, num_heads, head_dim], the recorder's.
    """

    def __init__(
        self,
        config: TriForceConfig,
        attention,
        queries: torch.Tensor,
        num_blocks: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        rows: Rows,
        num_slots: int,
        device: torch.device,
    ) -> None:
        if config.selection not in SELECTIONS_ON_DEVICE:
            raise ValueError(f"selection={config.selection!r} is not written for the device")
        num_layers, _, _, head_dim = queries.shape
        block_size = config.retrieval_chunk_size
        self.block_size = block_size
        self.recent_blocks = config.retrieval_recent_tokens // block_size
        self.most_selected = config.retrieval_budget // block_size - self.recent_blocks
        self._refresh_interval = config.refresh_interval
        self._needs_scores = config.selection == "retrieval"
        self._attention = attention
        self._queries = queries
        self._rows = rows
        per_pass = config.num_speculative_tokens + 1
        # Between two selections the tail grows by what the full passes add.
        self._most_growth = config.refresh_interval * per_pass
        reach = self._most_growth + 2 * per_pass + config.gamma
        self.width = self.most_selected + self.recent_blocks + -(-reach // block_size) + 2
        # Head-major, so that one head's means lie together.
        shape = (num_layers, num_kv_heads, num_blocks if self._needs_scores else 0, head_dim)
        self.means = torch.zeros(shape, dtype=dtype, device=device)
        self._selected = torch.zeros(
            num_slots,
            num_layers,
            num_kv_heads,
            self.most_selected,
            dtype=torch.int32,
            device=device,
        )
        self.tables = torch.zeros(
            num_layers,
            rows.most_rows * num_kv_heads,
            self.width,
            dtype=torch.int32,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        tensors = (self.means, self._selected, self.tables)
        return sum(t.numel() * t.element_size() for t in tensors)

    def due(self, slots: list[Slot], most_tokens: np.ndarray) -> list[int]:
        """For each row: 0, 1 where the selection is due, 2 where the slot has a new owner."""
        result = []
        for slot, newest in zip(slots, most_tokens.tolist()):
            slot.age += 1
            is_due = slot.age >= self._refresh_interval
            is_due |= newest - slot.selected_at > self._most_growth
            if slot.is_new or is_due:
                slot.age, slot.selected_at = 0, newest
            result.append(2 if slot.is_new else int(is_due))
            slot.is_new = False
        return result

    def refresh(
        self,
        batch: DeviceBatch,
        table: torch.Tensor,  # [num_rows, width], the retrieving group's block tables
        slots: list[Slot],
        due: list[int],
    ) -> None:
        """Selects for the rows that are due, and lays out the block tables of all."""
        rows, count = self._rows, self._rows.num_rows
        due_rows = [row for row, is_due in enumerate(due) if is_due]
        if due_rows:
            most_chunks = max(
                self.most_selected,
                *(int(batch.most_tokens[r]) // self.block_size for r in due_rows),
            )
            if self._needs_scores:
                fresh = [self._most_fresh(int(batch.most_tokens[r]), due[r]) for r in due_rows]
                self._attention.update_means(
                    self.means,
                    table,
                    rows.first_fresh[:count],
                    rows.last_fresh[:count],
                    max(fresh),
                )
            together = rows_at_a_time(len(self._queries), self._queries.shape[2], most_chunks)
            for start in range(0, len(due_rows), together):
                some = due_rows[start : start + together]
                indices = async_tensor_h2d([slots[r].index for r in some], table.device)
                self._selected[indices] = self._select(
                    batch, table, async_tensor_h2d(some, table.device), most_chunks
                )
        build_sparse_tables(
            self.tables,
            self._selected,
            rows.hosted[:count, 2].contiguous(),
            rows.num_selected[:count],
            rows.tail[:count],
            rows.num_blocks[:count],
            table,
            self._attention.head_strides(),
        )

    def _most_fresh(self, most_tokens: int, due: int) -> int:
        """Blocks that can have become full since the last selection."""
        if due == 2:
            return most_tokens // self.block_size
        return (2 * self._most_growth) // self.block_size + 2

    def _select(self, batch, table, some: torch.Tensor, most_chunks: int) -> torch.Tensor:
        """Block ids of the best chunks, [len(some), num_layers, num_kv_heads, most_selected]."""
        num_layers, num_kv_heads = self._selected.shape[1:3]
        own = table[some]
        num_chunks = self._rows.tail[some]
        if self._needs_scores:
            scores = score_chunks(
                self._queries,
                batch.query_rows[some],
                self.means,
                own,
                num_chunks,
                most_chunks,
            )
        else:  # the newest chunks
            places = torch.arange(most_chunks, device=table.device)
            scores = torch.where(places < num_chunks[:, None], places.float(), float("-inf"))
            scores = scores[:, None, None].expand(-1, num_layers, num_kv_heads, -1).clone()
        scores[..., 0] = float("inf")
        # Sorted: where there are fewer chunks than places, those that are none come last.
        chosen = scores.topk(self.most_selected, dim=-1, sorted=True).indices
        own = own[:, None, None].expand(-1, num_layers, num_kv_heads, -1)
        return own.gather(3, chosen.clamp_(max=own.shape[3] - 1))
