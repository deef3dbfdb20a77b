"""Proposals of level 1 alone, for requests that level 2 is not worth its time for.

TriForce's speculator for Runner V2: the proposals, and what is counted of them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.core.loop import propose
from vllm_triforce.kernels.draw import ExponentialSampler
from vllm_triforce.kernels.proposals import (
    PAD_TOKEN,
    DraftLogits,
    commit_proposals,
    count_full_pass,
    export_distributions,
    extend_proposals,
)
from vllm_triforce.kernels.row_table import Refresh
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.metrics.counters import DeviceCounters, LevelCounters, PartTimes
from vllm_triforce.runner_v2.batch import BatchV2, RowLogitsProcessor
from vllm_triforce.runner_v2.levels import LevelParts, LevelsV2, init_rows, take_slots
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.slots import Slots
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


def propose_directly(parts: LevelParts, source: DraftSourceV2, batch: BatchV2) -> None:
    """Fills ``rows.proposal`` with a source's tokens, ``gamma`` at a time; rows that have no more
    are left as they are."""
    slots, rows = take_slots(parts, batch), parts.rows
    source.begin(batch, slots)
    init_rows(parts, batch, slots, [Refresh.UNUSED] * len(batch))
    for number in range(int(batch.max_num_rounds.max())):
        source.draft(batch, rows, is_first=number == 0)
        distributions = source.distributions
        extend_proposals(rows, distributions, parts.counters)
        if not batch.sampling.all_greedy:
            logits = None if distributions is None else distributions.logits
            export_distributions(parts.handed_up, rows, logits)
    source.clean(batch, rows)


class ProposerV2:
    """Proposes by both levels, or straight from level 1, and hands the proposals to the batch.

    Args:
        sources: of level 1, by their names.
        level1: of them the one that drafts for level 2; None where level 2 proposes by itself.
        handed_up: where the outer test reads level 2's distributions; its dtype is that of all
            logits here, so that what is drawn from and what is handed up are the same numbers.
        counts: what kernels count.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        sources: Mapping[str, DraftSourceV2],
        level1: DraftSourceV2 | None,
        level2: RetrievalLevelV2,
        rows: Rows,
        slots: Slots,
        handed_up: DraftLogits,
        race: ExponentialSampler,
        shaping: RowLogitsProcessor,
        counts: DeviceCounters,
    ) -> None:
        self.sources = sources
        self.level1 = level1
        self.level2 = level2
        self.slots = slots
        self.handed_up = handed_up
        self.num_proposed = handed_up.num_proposed
        self.times = PartTimes(handed_up.logits.device)
        self._counts = counts
        self._parts = LevelParts(
            config, level1, level2, rows, slots, handed_up, counts.sums, race, shaping
        )
        self._observer = _ObserverV2(self.times)

    @property
    def counters(self) -> LevelCounters:
        """Sums so far; waits for the device."""
        return self._with_host_counts(self._counts.read())

    @property
    def known_counters(self) -> LevelCounters:
        """The same object always, at most some steps old."""
        return self._counts.known

    def _with_host_counts(self, counters: LevelCounters) -> LevelCounters:
        counters.num_level2_passes = self._observer.num_passes
        counters.time_seconds.update(self.times.seconds)
        return counters

    def reset_counters(self) -> None:
        """As if nothing had been proposed."""
        self._counts.reset()
        self._observer.reset()
        self.times.seconds.clear()

    def note_counters(self) -> None:
        """Brings ``known_counters`` up to date with what had been counted at the last call,
        without a wait for the device."""
        self._counts.note()
        self._with_host_counts(self._counts.known)

    def capture(self, mode) -> None:
        """Capture CUDA graphs of the passes of both levels, as far as they take part."""
        for source in self.sources.values():
            source.capture(mode)
        if self._parts.config.uses_level2:
            self.level2.capture(mode)

    def keeps_window(self, route: str) -> bool:
        """Whether whoever drafts by a route keeps a window, which a full pass without a proposal of
        it leaves behind."""
        source = self.sources.get(route, self.level1)
        return source is not None and source.keeps_window

    def begin(
        self,
        draft_tokens: torch.Tensor,  # [batch size, num_speculative_tokens], int64, written
        states: torch.Tensor,  # [batch size], int
    ) -> None:
        """Nobody has a proposal; padding stands in the place of each."""
        draft_tokens.fill_(PAD_TOKEN)
        self.num_proposed.index_fill_(0, states, 0)

    def propose(self, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Proposes by both levels, and hands it to the batch."""
        propose(LevelsV2(self._parts, batch), self._observer)
        self._finish(draft_tokens, is_direct=False)

    def propose_directly(self, source: str, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Proposes what a source drafts, and hands it to the batch."""
        with self.times.part("level 1"):
            propose_directly(self._parts, self.sources[source], batch)
        self._finish(draft_tokens, is_direct=True)

    def _finish(self, draft_tokens: torch.Tensor, is_direct: bool) -> None:
        commit_proposals(
            self._parts.rows, draft_tokens, self.handed_up, self._counts.sums, is_direct
        )

    def count_full_pass(
        self,
        scheduled: torch.Tensor,  # [batch size], int32
        states: torch.Tensor,  # [batch size], int
        num_sampled: torch.Tensor,  # [batch size], int
    ) -> None:
        count_full_pass(self._counts.sums, scheduled, states, num_sampled, self.num_proposed)


class _ObserverV2:
    """Times parts, and counts passes: what the host knows without asking the device."""

    def __init__(self, times: PartTimes) -> None:
        self._times = times
        self.num_passes = 0

    def reset(self) -> None:
        self.num_passes = 0

    def part(self, name: str) -> AbstractContextManager:
        return self._times.part(name)

    def round_ended(self, rows, drafted, verified) -> None:
        self.num_passes += 1
