"""Retrieval cache: the KV blocks that level 2 reads, by request, layer and KV head.

It holds no keys or values. RoPE is applied before keys are cached, so the ordinary paged kernel
attends to any subset of blocks by a shortened block table: the first block, the selected blocks,
then all blocks from the recent ones to the one being written.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_triforce.cache.allocation import checked_allocation
from vllm_triforce.cache.summaries import SCALE_BYTES, QuantizedSummaries
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.selection import SelectionPolicy, Summary


@dataclass
class Selection:
    """Blocks of one request that level 2 reads until one of its blocks fills."""

    num_before_tail: int
    """Blocks that level 2 reads before the tail. Passes select all but the first of them
    (``pass_selection.py``), where the whole context does not fit the budget."""
    tail_start: int
    """First logical block of the tail, which is the recent blocks and all later ones."""
    full_blocks: np.ndarray
    """Full blocks when it was made. A block table that differs shows a preemption."""
    summaries: dict[Summary, torch.Tensor] | None = None
    """By kind, [num_layers, num_kv_heads, num_candidates, head_dim], of ``candidates``; None where
    the whole context fits the budget."""

    @property
    def candidates(self) -> np.ndarray:  # [num_candidates]
        """Ids of the blocks among which passes select."""
        return self.full_blocks[1 : self.tail_start]


class RetrievalCache:
    """Selections of all speculating requests, and the summaries of all blocks.

    Args:
        attention: level 2's (``attention/cpu.py``).
        dtype: type of the queries.
    """

    def __init__(
        self,
        attention: Any,
        policy: SelectionPolicy,
        block_size: int,
        budget: RetrievalBudget,
        dtype: torch.dtype,
    ) -> None:
        self.policy = policy
        self.block_size = block_size
        self.budget = budget
        self._attention, self._dtype = attention, dtype
        self._selections: dict[str, Selection] = {}
        first = attention.layers[0]
        num_blocks, cpu = first.kv_cache.shape[0], torch.device("cpu")
        # Head-major, so that one gather gives the operand of a batched product.
        shape = len(attention.layers), first.num_kv_heads, num_blocks, first.head_size
        with checked_allocation(
            f"level 2's summaries of {num_blocks} blocks",
            len(policy.summaries) * math.prod(shape[:3]) * (first.head_size + SCALE_BYTES),
            cpu,
            "make the KV cache smaller (--kv-cache-memory-bytes, --gpu-memory-utilization, or "
            "VLLM_CPU_KVCACHE_SPACE on the CPU)",
        ):
            self.summaries = {
                kind: QuantizedSummaries.allocate(shape, cpu) for kind in policy.summaries
            }
        self._is_summarised = np.zeros(num_blocks, dtype=bool)

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
            if self.summaries and len(new):
                self._attention.summarize(self.summaries, torch.from_numpy(new.astype(np.int64)))
                self._is_summarised[new] = True
            selection = self._selections[request_id] = self._select(full_blocks)
        return selection

    def _select(self, full_blocks: np.ndarray) -> Selection:
        num_full, recent = len(full_blocks), self.budget.recent
        budget = self.budget.of(num_full)
        # The partly filled last block comes after the recent blocks, in the tail.
        tail_start = max(0, num_full - recent)
        if num_full <= budget:  # the whole context fits the budget
            return Selection(tail_start, tail_start, full_blocks)
        selection = Selection(budget - recent, tail_start, full_blocks)
        ids = torch.from_numpy(selection.candidates.astype(np.int64))
        selection.summaries = {
            kind: kept.dequantize(slice(None), ids).to(self._dtype)
            for kind, kept in self.summaries.items()
        }
        return selection

    def block_table(
        self,
        selections: list[Selection],
        block_ids: list[np.ndarray],  # per request, its block table
        num_tokens: list[int],  # per request, tokens that the table must reach
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Build block tables of one-head sequences (``cache/one_head_blocks.py``).

        Returns:
            tables: [num_layers, num_reqs, num_kv_heads, width], int32.
            num_skipped: [num_reqs], int32, context tokens that the tables leave out. Position p of
                a request is at p - num_skipped in its sequences.
        """
        rows = []
        for selection, blocks, count in zip(selections, block_ids, num_tokens):
            tail = blocks[selection.tail_start : -(-count // self.block_size)]
            row = np.concatenate([blocks[: selection.num_before_tail], tail]).astype(np.int32)
            rows.append(torch.from_numpy(row))
        heads = torch.arange(self._attention.num_kv_heads, dtype=torch.int32)[:, None]
        # Blocks are head-major.
        one_layer = pad_sequence(rows, batch_first=True)[:, None] * len(heads) + heads
        num_skipped = [(s.tail_start - s.num_before_tail) * self.block_size for s in selections]
        return (
            one_layer.repeat(len(self._attention.layers), 1, 1, 1),
            torch.tensor(num_skipped, dtype=torch.int32),
        )
