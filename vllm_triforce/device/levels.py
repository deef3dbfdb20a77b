"""Levels 1 and 2 for Runner V2: rows of a fixed shape, whose tokens stay on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.retrieval import DeviceRetrieval
from vllm_triforce.device.slots import Slots
from vllm_triforce.device.sources.source import DeviceSource
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.export_proposal import HandedUp, export_distributions
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.row_metadata import RowColumn, stack_columns
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.verification.masked_logits import masked_logits


@dataclass
class LevelParts:
    """What lasts from proposal to proposal."""

    config: ResolvedConfig
    level1: DeviceSource
    level2: DeviceRetrieval
    rows: Rows
    slots: Slots
    handed_up: HandedUp
    counters: torch.Tensor  # [number of DeviceCounter], int64
    race: Race


class DeviceLevels:
    """One proposal: ``core/propose.py``'s levels.

    A round adds 1 to ``gamma + 1`` tokens to each row. The host launches as many rounds as are
    needed at least, asks once how many tokens are missing at most, and so on: one wait for the
    device for a proposal whose drafts are accepted, never one per token. Rows that are finished
    take part to the end and are left as they are.

    Args:
        most: tokens of a proposal at most, ``num_speculative_tokens`` at most.
    """

    def __init__(self, parts: LevelParts, batch: DeviceBatch, most: int) -> None:
        self._parts = parts
        self._batch = batch
        self._most = most
        self._num_rounds = 0
        self._rounds_left = 0

    def begin(self) -> None:
        batch, rows = self._batch, self._parts.rows
        level1, level2 = self._parts.level1, self._parts.level2
        slots = [self._parts.slots.take(request_id) for request_id in batch.request_ids]
        due = level2.selections.due(slots, batch.max_computed_tokens)
        level1.begin(batch, slots)
        limits = np.minimum(batch.limits, np.iinfo(np.int32).max)
        row_metadata = stack_columns(
            {
                RowColumn.BATCH_ROW: batch.batch_rows,
                RowColumn.STATE: batch.states,
                RowColumn.SLOT: [slot.index for slot in slots],
                RowColumn.REFRESH: due,
                RowColumn.RESERVED: batch.reserved,
                RowColumn.LIMIT: limits,
                RowColumn.WINDOW_START: [slot.window_start for slot in slots],
            }
        )
        rows.begin(
            async_tensor_h2d(row_metadata, rows.row_metadata.device),
            batch.num_computed,
            batch.num_sampled,
            batch.last_sampled,
            self._parts.config.min_context,
            level2.selections.block_size,
            level2.selections.recent_blocks,
            level2.selections.max_selected,
            level2.selections.width,
        )
        if self._most < rows.num_speculative_tokens:
            rows.room.clamp_(max=self._most)
        level2.begin(batch, slots, due)

    def unfinished(self) -> Rows | None:
        if not self._rounds_left:
            self._rounds_left = self._rounds_needed()
        if not self._rounds_left:
            return None
        self._rounds_left -= 1
        self._num_rounds += 1
        return self._parts.rows

    def _rounds_needed(self) -> int:
        """At least, until every row is finished."""
        rows, missing = self._parts.rows, self._most
        if self._num_rounds >= self._most:
            return 0  # every round adds a token to every row that has room
        if self._num_rounds:
            left = rows.room[: rows.num_rows] - rows.length[: rows.num_rows]
            missing = int(left.max())  # the host waits here
        return max(0, -(-missing // (rows.gamma + 1)))

    def draft(self, rows: Rows) -> Distributions | None:
        """And what was drafted from; None where each token is certain, or all are greedy."""
        self._parts.level1.draft(self._batch, rows, is_first=self._num_rounds == 1)
        return None if self._batch.sampling.all_greedy else self._parts.level1.distributions

    def forward(
        self, rows: Rows, drafted: Distributions | None
    ) -> torch.Tensor:  # [num_rows, gamma + 1, vocab_size]
        return self._parts.level2.forward().to(self._parts.handed_up.logits.dtype)

    def verify(self, rows: Rows, drafted: Distributions | None, logits: torch.Tensor) -> None:
        parts, sampling, count = self._parts, self._batch.sampling, rows.num_rows
        top, best = logits.max(-1)
        distributions = None
        if not sampling.all_greedy:
            length = logits.shape[1]
            masked, lse = masked_logits(logits.flatten(0, 1), _Repeated(sampling, length))
            distributions = Distributions(masked.view(logits.shape), lse.view(count, length))
        target = LevelLogits(best, top, distributions)
        verify_drafts(rows, target, drafted, sampling, parts.race, parts.counters)
        if distributions is not None:
            export_distributions(
                parts.handed_up,
                rows,
                distributions.logits,
                sampling.temperature,
                sampling.is_certain,
            )

    def end(self) -> None:
        self._parts.level1.clean(self._batch, self._parts.rows)
        self._parts.level2.clean()


class _Repeated:
    """Sampling parameters, each row's ``length`` times over."""

    def __init__(self, sampling, length: int) -> None:
        def repeat(values):
            return None if values is None else values.repeat_interleave(length)

        self.temperature = repeat(sampling.temperature)
        self.top_k, self.top_p = repeat(sampling.top_k), repeat(sampling.top_p)
        self.min_p = repeat(sampling.min_p)
