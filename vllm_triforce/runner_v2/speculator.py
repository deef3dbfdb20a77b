"""Speculator of Model Runner V2: proposes through both levels, or from level 1 alone."""

from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from vllm_triforce.controller.routes import HIERARCHICAL
from vllm_triforce.core.loop import Observer, propose
from vllm_triforce.kernels.proposals import (
    PAD_TOKEN,
    commit_proposals,
    count_full_pass,
    export_distributions,
    extend_proposals,
)
from vllm_triforce.kernels.row_table import Refresh
from vllm_triforce.metrics.counters import LevelCounters, PartTimes
from vllm_triforce.runner_v2.batch import BatchV2
from vllm_triforce.runner_v2.levels import LevelParts, LevelsV2, init_rows, take_slots
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


class SpeculatorV2(Observer):
    """Proposes through both levels, or from level 1 alone, and writes the batch's draft tokens.

    Args:
        sources: level 1's sources by name.
    """

    def __init__(self, parts: LevelParts, sources: dict[str, DraftSourceV2]) -> None:
        self.sources = sources
        self.level1, self.level2 = parts.level1, parts.level2
        self.draft_logits = parts.draft_logits
        self.num_proposed = parts.draft_logits.num_proposed
        self.times = PartTimes(parts.context.device)
        self._counters = parts.context.counters
        self._parts = parts
        self._num_passes = 0  # of level 2

    @property
    def counters(self) -> LevelCounters:
        """Counters so far; waits for the device."""
        return self._with_host_counts(self._counters.read())

    @property
    def known_counters(self) -> LevelCounters:
        """Counters of at most a few steps ago; always the same object."""
        return self._counters.known

    def _with_host_counts(self, counters: LevelCounters) -> LevelCounters:
        counters.num_level2_passes = self._num_passes
        counters.time_seconds.update(self.times.seconds)
        return counters

    def reset_counters(self) -> None:
        """Reset all counters and times."""
        self._set_counts(torch.zeros_like(self._counters.sums), 0, {})

    @contextmanager
    def without_counting(self):
        """Leave counters and times as they are; waits for the device."""
        counts = self._counters.sums.clone(), self._num_passes, dict(self.times.seconds)
        try:
            yield
        finally:
            self._set_counts(*counts)

    def _set_counts(self, sums: torch.Tensor, num_passes: int, seconds: dict[str, float]) -> None:
        self._num_passes = num_passes
        self.times.seconds.clear()
        self.times.seconds.update(seconds)
        self._counters.set(sums)
        self._counters.known.time_seconds.clear()
        self._with_host_counts(self._counters.known)

    def note_counters(self) -> None:
        """Update ``known_counters`` to the state at the last call, without a wait."""
        self._counters.note()
        self._with_host_counts(self._counters.known)

    def capture(self, mode) -> None:
        """Capture CUDA graphs of the configured levels."""
        for source in self.sources.values():
            source.capture(mode)
        if self.level2 is not None and self._parts.context.config.uses_level2:
            self.level2.capture(mode)

    def keeps_window(self, route: str) -> bool:
        """Return True if the route's source keeps a window (``DraftSourceV2.keeps_window``)."""
        source = self.level1 if route == HIERARCHICAL else self.sources.get(route)
        return source is not None and source.keeps_window

    def begin(
        self,
        draft_tokens: torch.Tensor,  # [batch size, num_speculative_tokens], int64, written
        states: torch.Tensor,  # [batch size], int
    ) -> None:
        """Reset the batch's proposals to padding."""
        draft_tokens.fill_(PAD_TOKEN)
        self.num_proposed.index_fill_(0, states, 0)

    def propose(self, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Propose through both levels, and write ``draft_tokens``."""
        propose(LevelsV2(self._parts, batch), self)
        self._finish(draft_tokens, is_direct=False)

    def propose_by_level2(self, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Propose a token in each pass of level 2, and write ``draft_tokens``."""
        propose(LevelsV2(replace(self._parts, level1=None), batch), self)
        self._finish(draft_tokens, is_direct=False)

    def propose_directly(self, source: str, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Propose a source's drafts, ``gamma`` tokens a round, and write ``draft_tokens``.

        Rows whose source has no more drafts stay unchanged.
        """
        with self.times.part("level 1"):
            self._draft_directly(self.sources[source], batch)
        self._finish(draft_tokens, is_direct=True)

    def _draft_directly(self, source: DraftSourceV2, batch: BatchV2) -> None:
        parts, rows = self._parts, self._parts.context.rows
        slots = take_slots(parts.slots, rows, batch.request_ids)
        source.begin(batch, slots)
        init_rows(parts, batch, slots, [Refresh.UNUSED] * len(batch))
        for round_number in range(int(batch.max_num_rounds.max())):
            source.draft(batch, rows, is_first=round_number == 0)
            distributions = source.distributions
            extend_proposals(rows, distributions, self._counters.sums)
            if not batch.sampling.all_greedy:
                logits = None if distributions is None else distributions.logits
                export_distributions(parts.draft_logits, rows, logits)
        source.end(batch, rows)

    def _finish(self, draft_tokens: torch.Tensor, is_direct: bool) -> None:
        rows = self._parts.context.rows
        commit_proposals(rows, draft_tokens, self.draft_logits, self._counters.sums, is_direct)
        if self.draft_logits.synthetic is not None:
            self.draft_logits.synthetic.draw(rows, is_direct)

    def count_full_pass(
        self,
        scheduled: torch.Tensor,  # [batch size], int32
        states: torch.Tensor,  # [batch size], int
        num_sampled: torch.Tensor,  # [batch size], int
    ) -> None:
        """Count the outcome of a full pass."""
        count_full_pass(self._counters.sums, scheduled, states, num_sampled, self.num_proposed)

    # Of the loop's Observer, on the host:

    def part(self, name: str) -> AbstractContextManager:
        return self.times.part(name)

    def on_round_end(self, rows, drafted, verified) -> None:
        self._num_passes += 1
