"""TriForce's proposal on the device; ``host/triforce.py`` is the same, for reading."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.level1 import DeviceLevel1
from vllm_triforce.device.retrieval import DeviceRetrieval
from vllm_triforce.device.slots import Slots
from vllm_triforce.kernels.bookkeeping import count_full_pass
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.export_proposal import (
    HandedUp,
    clear_distributions,
    export_distributions,
)
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.row_metadata import RowColumn, stack_columns
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.metrics.counters import DeviceCounter, LevelCounters, read_device_counters
from vllm_triforce.metrics.part_times import PartTimes
from vllm_triforce.verification.masked_logits import masked_logits


class DeviceTriForce:
    """Level 1 drafts, level 2 verifies, until every proposal is long enough.

    A round adds 1 to ``gamma + 1`` tokens to each row. The host launches as many rounds as are
    needed at least, asks once how many tokens are missing at most, and so on: one wait for the
    device for a proposal whose drafts are accepted, never one per token.

    Args:
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab], where the outer test reads
            level 2's distributions; its dtype is that of all logits here, so that what is drawn
            from and what is handed up are the same numbers.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        level1: DeviceLevel1,
        level2: DeviceRetrieval,
        rows: Rows,
        slots: Slots,
        draft_logits: torch.Tensor,
        race: Race,
    ) -> None:
        self.config = config
        self.level1 = level1
        self.level2 = level2
        self.slots = slots
        self.times = PartTimes(draft_logits.device)
        self._rows = rows
        self._race = race
        device, places = draft_logits.device, draft_logits.shape[:2]
        is_stale = torch.zeros(places, dtype=torch.int8, device=device)
        self._handed_up = HandedUp(draft_logits, is_stale)
        self.num_proposed = torch.zeros(places[0], dtype=torch.int32, device=device)
        self._num_passes = 0
        self.known_counters = LevelCounters()
        """A copy of ``counters``, at most some steps old."""
        self._copied: torch.Tensor | None = None
        self._counters = torch.zeros(len(DeviceCounter), dtype=torch.int64, device=device)

    @property
    def counters(self) -> LevelCounters:
        """Sums so far; waits for the device."""
        counts = read_device_counters(self._counters.tolist())
        counts["num_level2_passes"] = self._num_passes
        return LevelCounters(**counts, time_seconds=dict(self.times.seconds))

    def note_counters(self) -> None:
        """Brings ``known_counters`` up to date with what had been counted at the last call,
        without a wait for the device."""
        if self._counters.device.type == "cpu":
            self._note(self._counters)
            return
        if self._copied is not None and self._copy_event.query():
            self._note(self._copied)
            self._copied = None
        if self._copied is None:
            self._copied = self._counters.to("cpu", non_blocking=True)
            self._copy_event = torch.cuda.Event()
            self._copy_event.record()

    def _note(self, counters: torch.Tensor) -> None:
        for name, value in read_device_counters(counters.tolist()).items():
            setattr(self.known_counters, name, value)
        self.known_counters.num_level2_passes = self._num_passes
        self.known_counters.time_seconds.update(self.times.seconds)

    def capture(self, mode) -> None:
        """Captures CUDA graphs of all passes of both levels."""
        self.level1.capture(mode)
        self.level2.capture(mode)

    def propose(self, batch: DeviceBatch, most: int) -> None:
        """Fills ``rows.proposal``, at most ``most`` tokens a row.

        Args:
            most: upper bound of a proposal, ``num_speculative_tokens`` at most.
        """
        rows, gamma = self._rows, self._rows.gamma
        self._begin(batch, most)
        missing, num_rounds = most, 0
        while missing > 0:
            for _ in range(-(-missing // (gamma + 1))):
                self._round(batch, is_first=num_rounds == 0)
                num_rounds += 1
            if num_rounds >= most:
                break  # every round adds a token to every row that has room
            left = rows.room[: rows.num_rows] - rows.length[: rows.num_rows]
            missing = int(left.max())  # the host waits here
        with self.times.part("verification"):
            self.level1.clean(batch, rows)
            self.level2.clean()

    def _begin(self, batch: DeviceBatch, most: int) -> None:
        rows, level2 = self._rows, self.level2
        with self.times.part("selection"):
            slots = [self.slots.take(request_id) for request_id in batch.request_ids]
            due = level2.selections.due(slots, batch.max_computed_tokens)
            self.level1.begin(batch, slots)
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
                self.config.min_context,
                level2.selections.block_size,
                level2.selections.recent_blocks,
                level2.selections.max_selected,
                level2.selections.width,
            )
            if most < rows.num_speculative_tokens:
                rows.room.clamp_(max=most)
            level2.begin(batch, slots, due)

    def _round(self, batch: DeviceBatch, is_first: bool) -> None:
        rows, sampling = self._rows, batch.sampling
        count = rows.num_rows
        self._num_passes += 1
        with self.times.part("level 1"):
            self.level1.draft(batch, rows, is_first)
        with self.times.part("level 2"):
            logits = self.level2.forward().to(self._handed_up.logits.dtype)
            top, best = logits.max(-1)
        with self.times.part("verification"):
            target = LevelLogits(best, top, None)
            if not sampling.all_greedy:
                length = logits.shape[1]
                masked, lse = masked_logits(logits.flatten(0, 1), _Repeated(sampling, length))
                target.distributions = Distributions(
                    masked.view(logits.shape), lse.view(count, length)
                )
            draft = self.level1.distributions
            verify_drafts(rows, target, draft, sampling, self._race, self._counters)
            if target.distributions is not None:
                export_distributions(
                    self._handed_up,
                    rows,
                    target.distributions.logits,
                    sampling.temperature,
                    sampling.is_certain,
                )

    def export_proposal(
        self,
        draft_tokens: torch.Tensor,  # [batch size, num_speculative_tokens], int64, written
        row_of_batch: torch.Tensor,  # [batch size], int32, -1 where not speculated on
        states: torch.Tensor,  # [batch size], int
    ) -> None:
        """Gives every request of the batch its proposal, padded where it is short or none."""
        self._rows.finish(draft_tokens, row_of_batch, states, self.num_proposed, self._counters)
        clear_distributions(self._handed_up, states, self.num_proposed)

    def count_full_pass(
        self,
        scheduled: torch.Tensor,  # [batch size], int32
        states: torch.Tensor,  # [batch size], int
        num_sampled: torch.Tensor,  # [batch size], int
    ) -> None:
        count_full_pass(self._counters, scheduled, states, num_sampled, self.num_proposed)


class _Repeated:
    """Sampling parameters, each row's ``length`` times over."""

    def __init__(self, sampling, length: int) -> None:
        def repeat(values):
            return None if values is None else values.repeat_interleave(length)

        self.temperature = repeat(sampling.temperature)
        self.top_k, self.top_p = repeat(sampling.top_k), repeat(sampling.top_p)
        self.min_p = repeat(sampling.min_p)
