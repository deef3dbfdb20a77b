"""The beginning of a proposal, by whichever route.

Levels 1 and 2 for Runner V2: rows of a fixed shape, whose tokens stay on the device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.proposals import DraftLogits, export_distributions
from vllm_triforce.kernels.row_table import Refresh, RowColumn, stack_columns
from vllm_triforce.kernels.rows import RowLimits, Rows
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.runner_v2.batch import BatchV2, RowLogitsProcessor
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.slots import Slot, Slots
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


@dataclass
class LevelParts:
    """What lasts from proposal to proposal."""

    config: ResolvedConfig
    level1: DraftSourceV2 | None
    """What drafts for level 2; None where level 2 proposes by itself."""
    level2: RetrievalLevelV2
    rows: Rows
    slots: Slots
    handed_up: DraftLogits
    counters: torch.Tensor  # [number of DeviceCounter], int64
    race: ExponentialSampler
    shaping: RowLogitsProcessor


def take_slots(parts: LevelParts, batch: BatchV2) -> list[Slot]:
    """Each row's slot; whoever has just got one has no fault."""
    new = [name for name in batch.request_ids if name not in parts.slots]
    slots = [parts.slots.take(request_id) for request_id in batch.request_ids]
    if new:
        taken = [parts.slots.take(name).index for name in new]
        disabled = parts.rows.slot_disabled
        disabled.index_fill_(0, async_tensor_h2d(np.array(taken), device=disabled.device), 0)
    return slots


def init_rows(parts: LevelParts, batch: BatchV2, slots: list[Slot], refresh: list[Refresh]) -> None:
    """Tells the device of the rows; it finds out how much each may propose."""
    rows, selections = parts.rows, parts.level2.selections
    row_metadata = stack_columns(
        {
            RowColumn.BATCH_ROW: batch.batch_rows,
            RowColumn.STATE: batch.states,
            RowColumn.SLOT: [slot.index for slot in slots],
            RowColumn.REFRESH: refresh,
            RowColumn.RESERVED: batch.reserved,
            RowColumn.LIMIT: np.minimum(batch.limits, np.iinfo(np.int32).max),
            RowColumn.WINDOW_START: [slot.window_start for slot in slots],
            RowColumn.MAX_TOKENS: batch.max_num_tokens,
            RowColumn.MAX_ROUNDS: batch.max_num_rounds,
            RowColumn.ONE_HOT: batch.is_one_hot,
        }
    )
    rows.init(
        async_tensor_h2d(row_metadata, rows.row_metadata.device),
        batch.num_computed,
        batch.num_sampled,
        batch.last_sampled,
        batch.parameters,
        RowLimits(
            parts.config.min_context,
            selections.block_size,
            selections.recent_blocks,
            selections.max_selected,
            selections.width,
        ),
    )
    if batch.sampling.kind != "greedy":  # a graph shapes them all
        parts.shaping.begin()


class LevelsV2:
    """One proposal: ``core/loop.py``'s levels.

    A round adds 1 to ``gamma + 1`` tokens to each row. The host launches as many rounds as were
    planned, without a word from the device: rows that are finished take part to the end and are
    left as they are, and those that are not end with what they have. When they end depends on
    tokens before that, never on the one that would come, so no proposal is bent by it.
    """

    def __init__(self, parts: LevelParts, batch: BatchV2) -> None:
        self._parts = parts
        self._batch = batch
        self._rounds_left = int(batch.max_num_rounds.max())
        self._is_first = True

    def begin(self) -> None:
        parts, batch = self._parts, self._batch
        slots = take_slots(parts, batch)
        due = parts.level2.selections.due(slots, batch.max_computed_tokens)
        if parts.level1 is not None:
            parts.level1.begin(batch, slots)
        init_rows(parts, batch, slots, due)
        parts.level2.begin(batch, slots, due)

    def unfinished(self) -> Rows | None:
        if not self._rounds_left:
            return None
        self._rounds_left -= 1
        return self._parts.rows

    def draft(self, rows: Rows) -> Distributions | None:
        """And what was drafted from; None where each token is certain, or all are greedy."""
        level1 = self._parts.level1
        if level1 is None:
            rows.num_drafted.zero_()
            return None
        level1.draft(self._batch, rows, self._is_first)
        self._is_first = False
        return None if self._batch.sampling.all_greedy else level1.distributions

    def forward(self, rows: Rows, drafted: Distributions | None) -> LevelLogits:
        return self._parts.level2.forward()

    def verify(self, rows: Rows, drafted: Distributions | None, logits: LevelLogits) -> None:
        parts = self._parts
        verify_drafts(rows, logits, drafted, parts.race, parts.counters)
        if logits.distributions is not None:
            export_distributions(parts.handed_up, rows, logits.distributions.logits)

    def end(self) -> None:
        if self._parts.level1 is not None:
            self._parts.level1.clean(self._batch, self._parts.rows)
        self._parts.level2.clean()
