"""TriForce's proposals on Model Runner V2, through both levels or from level 1 alone."""

from contextlib import AbstractContextManager

import torch

from vllm_triforce.core.loop import Observer, propose
from vllm_triforce.kernels.proposals import (
    PAD_TOKEN,
    DraftLogits,
    commit_proposals,
    count_full_pass,
    export_distributions,
    extend_proposals,
)
from vllm_triforce.kernels.row_table import Refresh
from vllm_triforce.metrics.counters import LevelCounters, PartTimes
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext
from vllm_triforce.runner_v2.levels import LevelParts, LevelsV2, init_rows, take_slots
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.slots import Slots
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


def propose_directly(parts: LevelParts, source: DraftSourceV2, batch: BatchV2) -> None:
    """Fill ``rows.proposal`` with a source's drafts, ``gamma`` tokens a round.

    Rows whose source has no more drafts stay unchanged.
    """
    slots, rows = take_slots(parts, batch), parts.context.rows
    source.begin(batch, slots)
    init_rows(parts, batch, slots, [Refresh.UNUSED] * len(batch))
    for round_number in range(int(batch.max_num_rounds.max())):
        source.draft(batch, rows, is_first=round_number == 0)
        distributions = source.distributions
        extend_proposals(rows, distributions, parts.context.counters.sums)
        if not batch.sampling.all_greedy:
            logits = None if distributions is None else distributions.logits
            export_distributions(parts.draft_logits, rows, logits)
    source.end(batch, rows)


class ProposerV2:
    """Proposes through both levels, or from level 1 alone, and writes the batch's draft tokens.

    Args:
        sources: level 1's sources by name.
        level1: source that drafts for level 2; None where level 2 proposes by itself.
        draft_logits: distributions that vLLM's rejection sampler reads.
    """

    def __init__(
        self,
        context: ProposalContext,
        sources: dict[str, DraftSourceV2],
        level1: DraftSourceV2 | None,
        level2: RetrievalLevelV2,
        slots: Slots,
        draft_logits: DraftLogits,
    ) -> None:
        self.sources = sources
        self.level1 = level1
        self.level2 = level2
        self.draft_logits = draft_logits
        self.num_proposed = draft_logits.num_proposed
        self.times = PartTimes(context.device)
        self._counters = context.counters
        self._parts = LevelParts(context, level1, level2, slots, draft_logits)
        self._observer = _ObserverV2(self.times)

    @property
    def counters(self) -> LevelCounters:
        """Counters so far; waits for the device."""
        return self._with_host_counts(self._counters.read())

    @property
    def known_counters(self) -> LevelCounters:
        """Counters of at most a few steps ago; always the same object."""
        return self._counters.known

    def _with_host_counts(self, counters: LevelCounters) -> LevelCounters:
        counters.num_level2_passes = self._observer.num_passes
        counters.time_seconds.update(self.times.seconds)
        return counters

    def reset_counters(self) -> None:
        """Reset all counters and times."""
        self._counters.reset()
        self._observer.reset()
        self.times.seconds.clear()

    def note_counters(self) -> None:
        """Update ``known_counters`` to the state at the last call, without a wait."""
        self._counters.note()
        self._with_host_counts(self._counters.known)

    def capture(self, mode) -> None:
        """Capture CUDA graphs of the configured levels."""
        for source in self.sources.values():
            source.capture(mode)
        if self._parts.context.config.uses_level2:
            self.level2.capture(mode)

    def keeps_window(self, route: str) -> bool:
        """Return True if the route's source keeps a window (``DraftSourceV2.keeps_window``)."""
        source = self.sources.get(route, self.level1)
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
        propose(LevelsV2(self._parts, batch), self._observer)
        self._finish(draft_tokens, is_direct=False)

    def propose_directly(self, source: str, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Propose a source's drafts, and write ``draft_tokens``."""
        with self.times.part("level 1"):
            propose_directly(self._parts, self.sources[source], batch)
        self._finish(draft_tokens, is_direct=True)

    def _finish(self, draft_tokens: torch.Tensor, is_direct: bool) -> None:
        rows = self._parts.context.rows
        commit_proposals(rows, draft_tokens, self.draft_logits, self._counters.sums, is_direct)

    def count_full_pass(
        self,
        scheduled: torch.Tensor,  # [batch size], int32
        states: torch.Tensor,  # [batch size], int
        num_sampled: torch.Tensor,  # [batch size], int
    ) -> None:
        """Count the outcome of a full pass."""
        count_full_pass(self._counters.sums, scheduled, states, num_sampled, self.num_proposed)


class _ObserverV2(Observer):
    """Times parts and counts passes, both on the host."""

    def __init__(self, times: PartTimes) -> None:
        self._times = times
        self.num_passes = 0

    def reset(self) -> None:
        self.num_passes = 0

    def part(self, name: str) -> AbstractContextManager:
        return self._times.part(name)

    def on_round_end(self, rows, drafted, verified) -> None:
        self.num_passes += 1
