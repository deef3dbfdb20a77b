"""Retrieval cache: the KV blocks that level 2 reads, by request, layer and KV head.

It holds no keys or values. RoPE is applied before keys are cached, so the ordinary paged kernel
attends to any subset of blocks by a shortened block table: the first block, the selected blocks,
then all blocks from the recent ones to the one being written.
"""

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
    """Blocks of one request that level 2 reads until one of its blocks fills."""

    blocks: torch.Tensor
    """[num_layers, num_kv_heads, num_selected], ids of the first and the selected blocks."""
    tail_start: int
    """First logical block of the tail, which is the recent blocks and all later ones."""
    full_blocks: np.ndarray
    """Full blocks when it was made. A block table that differs shows a preemption."""
    candidates: Candidates | None = None
    """Chunks that passes select in the place of ``blocks`` after the first; None where the whole
    context fits the budget."""

    @property
    def num_selected(self) -> int:
        return self.blocks.shape[-1]


class RetrievalCache:
    """Selections of all speculating requests."""

    def __init__(
        self,
        summaries: ChunkSummaries,
        policy: SelectionPolicy,
        block_size: int,
        budget: RetrievalBudget,
    ) -> None:
        self.summaries = summaries
        self.policy = policy
        self.block_size = block_size
        self.budget = budget
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
    ) -> Selection:
        """Return the request's selection, made anew where a block filled or was replaced."""
        num_full = num_computed_tokens // self.block_size
        selection = self._selections.get(request_id)
        full_blocks = block_ids[:num_full]
        if selection is None or not np.array_equal(selection.full_blocks, full_blocks):
            full_blocks = full_blocks.copy()
            new = full_blocks[~self._is_summarised[full_blocks]]
            if self.policy.summaries and len(new):
                self.summaries.update(torch.from_numpy(new.astype(np.int64)))
                self._is_summarised[new] = True
            selection = self._selections[request_id] = self._select(full_blocks)
        return selection

    def _select(self, full_blocks: np.ndarray) -> Selection:
        ids = torch.from_numpy(full_blocks.astype(np.int64))
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
        blocks = ids[: 1 + num_selected].expand(num_layers, num_kv_heads, -1)
        choice = Candidates(num_selected, candidates, self.summaries.gather(candidates))
        return Selection(blocks, tail_start, full_blocks, choice)

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
        # Blocks are head-major.
        tables.mul_(num_kv_heads).add_(torch.arange(num_kv_heads, dtype=torch.int32)[:, None])
        return tables.flatten(1, 2), num_skipped
