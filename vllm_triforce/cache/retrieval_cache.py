"""Retrieval cache: the KV blocks that level 2 reads, by request, layer and KV head.

It holds no keys or values. RoPE is applied before keys are cached, so the ordinary paged kernel
attends to any subset of blocks by a shortened block table: the first block, the selected blocks,
then all blocks from the recent ones to the one being written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_triforce.cache.summaries import ChunkSummaries
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.selection import SelectionPolicy, Summary


@dataclass
class Candidates:
    """Chunks of one request among which the layers select in a pass (``pass_selection.py``)."""

    num_selected: int
    block_ids: torch.Tensor  # [num_candidates], int64
    summaries: dict[Summary, torch.Tensor]
    """By kind, [num_layers, num_kv_heads, num_candidates, head_dim]."""


@dataclass
class Selection:
    """Blocks of one request that level 2 reads until the next refresh."""

    blocks: torch.Tensor
    """[num_layers, num_kv_heads, num_selected], ids of the first and the selected blocks."""
    tail_start: int
    """First logical block of the tail, which is the recent blocks and all later ones."""
    full_blocks: np.ndarray
    """Full blocks at the last refresh. A block table that differs shows a preemption."""
    age: int = 0
    """Full passes since the last refresh."""
    candidates: Candidates | None = None
    """Set where the selected blocks are replaced within passes."""

    @property
    def num_selected(self) -> int:
        return self.blocks.shape[-1]


class RetrievalCache:
    """Selections of all speculating requests.

    Args:
        refresh_interval: full passes between two selections; 0 to select inside level 2's passes,
            some of which replace the blocks of a ``Selection`` with ``candidates``.
        head_strides: ``(per_block, per_head)`` of ``OneHeadBlocks``; head-major by default.
    """

    def __init__(
        self,
        summaries: ChunkSummaries,
        policy: SelectionPolicy,
        block_size: int,
        budget: RetrievalBudget,
        refresh_interval: int,
        head_strides: tuple[int, int] | None = None,
    ) -> None:
        self.summaries = summaries
        self.head_strides = head_strides or (summaries.num_kv_heads, 1)
        self.policy = policy
        self.block_size = block_size
        self.budget = budget
        self.refresh_interval = refresh_interval
        self._selections: dict[str, Selection] = {}
        self._is_summarised = np.zeros(summaries.num_blocks, dtype=bool)

    def invalidate_summaries(self, block_ids: list[int]) -> None:
        """Invalidate the summaries of newly allocated blocks, which will be overwritten.

        All other blocks keep their contents, so a prefix cache hit keeps its summaries too.
        """
        self._is_summarised[block_ids] = False

    def release(self, request_id: str) -> None:
        self._selections.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._selections)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._selections

    def selection(
        self,
        request_id: str,
        block_ids: np.ndarray,  # [>= num_full_blocks], the request's block table
        num_computed_tokens: int,
        query: Callable[[], torch.Tensor],  # returns [num_layers, num_heads, head_dim]
    ) -> Selection:
        """Return the request's selection, refreshed when due; ``query`` is called only then."""
        num_full = num_computed_tokens // self.block_size
        selection = self._selections.get(request_id)
        if selection is not None:
            selection.age += 1
            num_seen = len(selection.full_blocks)
            is_due = selection.age >= self.refresh_interval
            if self.refresh_interval == 0:
                is_due = num_full > num_seen
            is_preempted = num_seen > num_full or not np.array_equal(
                selection.full_blocks, block_ids[:num_seen]
            )
            if not (is_due or is_preempted):
                return selection
        full_blocks = block_ids[:num_full].copy()
        if self.policy.summaries:
            self._summarise(full_blocks)
        selection = self._selections[request_id] = self._select(full_blocks, query)
        return selection

    def _summarise(self, full_blocks: np.ndarray) -> None:
        newly_full = full_blocks[~self._is_summarised[full_blocks]]
        if len(newly_full):
            ids = torch.from_numpy(newly_full.astype(np.int64))
            self.summaries.update(ids.to(self.summaries.device))
            self._is_summarised[newly_full] = True

    def _select(self, full_blocks: np.ndarray, query: Callable[[], torch.Tensor]) -> Selection:
        ids = torch.from_numpy(full_blocks.astype(np.int64)).to(self.summaries.device)
        num_layers, num_kv_heads = self.summaries.num_layers, self.summaries.num_kv_heads
        num_full = len(full_blocks)
        recent, budget = self.budget.recent, self.budget.of(num_full)
        if num_full <= budget:  # the whole context fits the budget
            head = ids[: max(0, num_full - recent)]
            return Selection(head.expand(num_layers, num_kv_heads, -1), len(head), full_blocks)
        # The partly filled last block comes after these recent blocks, in the tail.
        tail_start = num_full - recent
        candidates = ids[1:tail_start]
        num_selected = budget - recent - 1
        summaries = self.summaries.gather(candidates)
        if self.refresh_interval == 0:
            blocks = ids[: 1 + num_selected].expand(num_layers, num_kv_heads, -1)
            choice = Candidates(num_selected, candidates, summaries)
            return Selection(blocks, tail_start, full_blocks, candidates=choice)
        chosen = self.policy.select(query(), summaries, num_kv_heads, len(candidates), num_selected)
        first = ids[:1].expand(num_layers, num_kv_heads, 1)
        blocks = torch.cat([first, candidates[chosen]], dim=-1)
        return Selection(blocks, tail_start, full_blocks)

    def block_table(
        self,
        selections: list[Selection],
        block_ids: list[np.ndarray],  # per request, its block table
        num_tokens: list[int],  # per request, tokens that the table must reach
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Build block tables of one-head sequences (``cache/one_head_blocks.py``).

        Each request becomes ``num_kv_heads`` sequences, one after the other.

        Returns:
            tables: [num_layers, num_reqs * num_kv_heads, width], int32.
            num_skipped: [num_reqs], int32, context tokens that the tables leave out. Position p of
                a request is at p - num_skipped in its sequences.
        """
        num_layers, num_kv_heads = self.summaries.num_layers, self.summaries.num_kv_heads
        tails = [-(-n // self.block_size) - s.tail_start for s, n in zip(selections, num_tokens)]
        width = max(s.num_selected + tail for s, tail in zip(selections, tails))
        tables = torch.zeros(num_layers, len(selections), num_kv_heads, width, dtype=torch.int32)
        num_skipped = torch.empty(len(selections), dtype=torch.int32)
        for row, (selection, blocks, tail) in enumerate(zip(selections, block_ids, tails)):
            k, start = selection.num_selected, selection.tail_start
            tables[:, row, :, :k] = selection.blocks
            tables[:, row, :, k : k + tail] = torch.from_numpy(
                blocks[start : start + tail].astype(np.int32)
            )
            num_skipped[row] = (start - k) * self.block_size
        heads = torch.arange(num_kv_heads, dtype=torch.int32)
        per_block, per_head = self.head_strides
        tables.mul_(per_block).add_((heads * per_head)[:, None])
        device = self.summaries.device
        return tables.flatten(1, 2).to(device), num_skipped.to(device)
