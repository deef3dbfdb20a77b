"""Levels 1 and 2 of Runner V2. Rows have a fixed shape.

A proposal through the levels, or from level 1 alone (``speculator.py``), begins with
``take_slots()`` and ``init_rows()``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.kernels.draw import Distributions, LevelLogits
from vllm_triforce.kernels.proposals import (
    DraftLogits,
    export_distributions,
)
from vllm_triforce.kernels.row_table import Refresh, RowColumn, stack_columns
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.slots import Slot, Slots
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


@dataclass(frozen=True)
class LevelParts:
    """Parts of levels 1 and 2 that last from proposal to proposal.

    Args:
        level1: source that drafts for level 2; None where level 2 proposes by itself.
        level2: None where drafts go straight to the full pass.
        draft_logits: distributions that vLLM's rejection sampler reads.
    """

    context: ProposalContext
    level1: DraftSourceV2 | None
    level2: RetrievalLevelV2 | None
    slots: Slots
    draft_logits: DraftLogits


def take_slots(slots: Slots, rows: Rows, request_ids: Sequence[str]) -> list[Slot]:
    """Assign a slot to each request, and clear the NaN flags of new slots."""
    new_ids = [request_id for request_id in request_ids if request_id not in slots]
    taken = [slots.take(request_id) for request_id in request_ids]
    if new_ids:
        indices = [slots.take(request_id).index for request_id in new_ids]
        disabled = rows.slot_disabled
        disabled.index_fill_(0, async_tensor_h2d(np.array(indices), device=disabled.device), 0)
    return taken


def init_rows(
    parts: LevelParts, batch: BatchV2, slots: list[Slot], refreshes: list[Refresh]
) -> None:
    """Send the rows' metadata to the device, which computes how much each may propose."""
    rows = parts.context.rows
    for slot in slots:
        slot.has_proposed = True
    row_metadata = stack_columns(
        {
            RowColumn.BATCH_ROW: batch.batch_rows,
            RowColumn.STATE: batch.states,
            RowColumn.SLOT: [slot.index for slot in slots],
            RowColumn.REFRESH: refreshes,
            RowColumn.RESERVED: batch.reserved_tokens,
            RowColumn.LIMIT: np.minimum(batch.max_lens, np.iinfo(np.int32).max),
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
    )
    if batch.sampling.kind != "greedy":  # a graph of any other kind applies processors
        parts.context.logits_processing.begin()


class LevelsV2:
    """Levels of one proposal (``core/loop.py``).

    A round adds 1 to ``gamma + 1`` tokens to each row. The host launches the planned number of
    rounds without waiting for the device. Finished rows stay in the batch unchanged, unfinished
    ones end with the tokens they have. A proposal's end depends on earlier tokens only, never on
    the token that would come next, so it does not bias the distribution.
    """

    def __init__(self, parts: LevelParts, batch: BatchV2) -> None:
        assert parts.level2 is not None, "drafts go straight to the full pass"
        self._parts, self._level2 = parts, parts.level2
        self._batch = batch
        self._rounds_left = int(batch.max_num_rounds.max())
        self._is_first = True

    def begin(self) -> None:
        parts, batch = self._parts, self._batch
        slots = take_slots(parts.slots, parts.context.rows, batch.request_ids)
        refreshes = self._level2.selections.schedule_refresh(slots, batch.max_computed_tokens)
        if parts.level1 is not None:
            parts.level1.begin(batch, slots)
        init_rows(parts, batch, slots, refreshes)
        self._level2.begin(batch, slots, refreshes)

    def unfinished(self) -> Rows | None:
        if not self._rounds_left:
            return None
        self._rounds_left -= 1
        return self._parts.context.rows

    def draft(self, rows: Rows) -> Distributions | None:
        """Draft a round; return its distributions, None if one-hot or if all rows are greedy."""
        level1 = self._parts.level1
        if level1 is None:
            rows.num_drafted.zero_()
            return None
        level1.draft(self._batch, rows, self._is_first)
        self._is_first = False
        return None if self._batch.sampling.all_greedy else level1.distributions

    def forward(self, rows: Rows, drafted: Distributions | None) -> LevelLogits:
        return self._level2.forward(self._batch.sampling)

    def verify(self, rows: Rows, drafted: Distributions | None, logits: LevelLogits) -> None:
        parts = self._parts
        context = parts.context
        rate = context.config.synthetic_level1_acceptance
        verify_drafts(rows, logits, drafted, context.sampler, context.counters.sums, rate)
        if logits.distributions is not None:
            export_distributions(parts.draft_logits, rows, logits.distributions.logits)

    def end(self) -> None:
        if self._parts.level1 is not None:
            self._parts.level1.end(self._batch, self._parts.context.rows)
        self._level2.scrub(self._batch)
