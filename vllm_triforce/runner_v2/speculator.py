"""Speculator of Model Runner V2: proposes through both levels, or from level 1 alone.

Rows have a fixed shape. A proposal begins with ``ProposalContext.take_slots()`` and
``init_rows()``.
"""

from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.cache.pass_selection import may_select
from vllm_triforce.controller.routes import HIERARCHICAL, LEVEL2_ALONE
from vllm_triforce.core.loop import Observer, propose
from vllm_triforce.kernels.draw import Distributions, LevelLogits
from vllm_triforce.kernels.proposals import (
    PAD_TOKEN,
    DraftLogits,
    commit_proposals,
    count_full_pass,
    export_distributions,
    extend_proposals,
)
from vllm_triforce.kernels.row_table import Owner, RowColumn, stack_columns
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.metrics.counters import LevelCounters, PartTimes
from vllm_triforce.runner_v2.batch import BatchV2, ProposalContext, Slot
from vllm_triforce.runner_v2.retrieval import RetrievalLevelV2
from vllm_triforce.runner_v2.sources.source import DraftSourceV2


class SpeculatorV2(Observer):
    """Proposes by any route, and writes the batch's draft tokens.

    Args:
        sources: level 1's sources by name.
        level1: source that drafts for level 2; None where level 2 proposes by itself.
        level2: None where drafts go straight to the full pass.
        draft_logits: distributions that vLLM's rejection sampler reads.
    """

    def __init__(
        self,
        context: ProposalContext,
        sources: dict[str, DraftSourceV2],
        level1: DraftSourceV2 | None,
        level2: RetrievalLevelV2 | None,
        draft_logits: DraftLogits,
    ) -> None:
        self.context = context
        self.sources = sources
        self.level1, self.level2 = level1, level2
        self.draft_logits = draft_logits
        self.num_proposed = draft_logits.num_proposed
        self._counters = context.counters
        self.times = PartTimes(context.device)
        self.known_counters = counters = context.counters.known
        """Counters of at most a few steps ago. The host's own, passes of level 2 and times, are
        counted here."""
        counters.time_seconds = self.times.seconds

    @property
    def counters(self) -> LevelCounters:
        """Counters so far; waits for the device."""
        counters = self._counters.read()
        counters.num_level2_passes = self.known_counters.num_level2_passes
        counters.time_seconds.update(self.times.seconds)
        return counters

    def reset_counters(self) -> None:
        """Reset all counters and times."""
        self._set_counts(torch.zeros_like(self._counters.sums), 0, {})

    @contextmanager
    def without_counting(self):
        """Restore counters and times; waits for the device."""
        num_passes = self.known_counters.num_level2_passes
        counts = self._counters.sums.clone(), num_passes, dict(self.times.seconds)
        try:
            yield
        finally:
            self._set_counts(*counts)

    def _set_counts(self, sums: torch.Tensor, num_passes: int, seconds: dict[str, float]) -> None:
        self._counters.set(sums)
        counters = self.known_counters
        counters.num_level2_passes = num_passes
        self.times.seconds.clear()
        self.times.seconds.update(seconds)

    def capture(self, mode) -> None:
        for source in self.sources.values():
            source.capture(mode)
        if self.level2 is not None:
            self.level2.capture(mode)

    def keeps_window(self, route: str) -> bool:
        """True if the route's source keeps a window (``DraftSourceV2.keeps_window``)."""
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

    def propose(self, route: str, batch: BatchV2, draft_tokens: torch.Tensor) -> None:
        """Propose by a route, and write ``draft_tokens``.

        Rows whose source has no drafts stay unchanged.
        """
        is_direct = route not in (HIERARCHICAL, LEVEL2_ALONE)
        if is_direct:
            with self.times.part("level 1"):
                self._draft_directly(self.sources[route], batch)
        else:
            level1 = self.level1 if route == HIERARCHICAL else None
            propose(LevelsV2(self, level1, batch), self)
        rows = self.context.rows
        commit_proposals(rows, draft_tokens, self.draft_logits, self._counters.sums, is_direct)
        if self.draft_logits.synthetic is not None:
            self.draft_logits.synthetic.draw(rows, is_direct)

    def _draft_directly(self, source: DraftSourceV2, batch: BatchV2) -> None:
        """Extend proposals by the source's drafts, ``gamma`` tokens a round."""
        rows, slots = self.context.rows, self.context.take_slots(batch.request_ids)
        source.begin(batch, slots)
        init_rows(self.context, batch, slots, [Owner.UNUSED] * len(batch))
        for round_number in range(int(batch.max_num_rounds.max())):
            source.draft(batch, rows, is_first=round_number == 0)
            distributions = source.distributions
            extend_proposals(rows, distributions, self._counters.sums)
            if not batch.sampling.all_greedy:
                logits = None if distributions is None else distributions.logits
                export_distributions(self.draft_logits, rows, logits)
        source.end(batch, rows)

    def count_full_pass(
        self,
        scheduled: torch.Tensor,  # [batch size], int32
        states: torch.Tensor,  # [batch size], int
        num_sampled: torch.Tensor,  # [batch size], int
    ) -> None:
        count_full_pass(self._counters.sums, scheduled, states, num_sampled, self.num_proposed)

    # Of the loop's Observer, on the host:

    def part(self, name: str) -> AbstractContextManager:
        return self.times.part(name)

    def on_round_end(self, rows, drafted, verified) -> None:
        counters = self.known_counters
        counters.num_level2_passes += 1


def init_rows(
    context: ProposalContext, batch: BatchV2, slots: list[Slot], owners: list[Owner]
) -> None:
    """Send the rows' metadata to the device, which computes how much each may propose."""
    rows = context.rows
    for slot in slots:
        slot.has_proposed = True
    row_metadata = stack_columns(
        {
            RowColumn.BATCH_ROW: batch.batch_rows,
            RowColumn.STATE: batch.states,
            RowColumn.SLOT: [slot.index for slot in slots],
            RowColumn.OWNER: owners,
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
    if batch.sampling.kind == "any":  # its graphs apply processors
        context.logits_processing.begin()


class LevelsV2:
    """Levels of one proposal (``core/loop.py``).

    A round adds 1 to ``gamma + 1`` tokens to each row. The host launches the planned number of
    rounds without waiting for the device. Finished rows stay in the batch unchanged, unfinished
    ones end with the tokens they have. A proposal's end depends on earlier tokens only, never on
    the token that would come next, so it does not bias the distribution.
    """

    def __init__(
        self, speculator: SpeculatorV2, level1: DraftSourceV2 | None, batch: BatchV2
    ) -> None:
        assert speculator.level2 is not None, "drafts go straight to the full pass"
        self._context, self._draft_logits = speculator.context, speculator.draft_logits
        self._level1, self._level2 = level1, speculator.level2
        self._batch = batch
        self._num_rounds = 0  # begun

    def begin(self) -> None:
        batch = self._batch
        slots = self._context.take_slots(batch.request_ids)
        owners = [Owner.NEW_OWNER if slot.is_new else Owner.SAME_OWNER for slot in slots]
        for slot in slots:
            slot.is_new = False
        if self._level1 is not None:
            self._level1.begin(batch, slots)
        init_rows(self._context, batch, slots, owners)
        self._level2.begin(batch, slots, owners)

    def unfinished(self) -> Rows | None:
        if self._num_rounds == self._batch.max_num_rounds.max():
            return None
        self._num_rounds += 1
        return self._context.rows

    def draft(self, rows: Rows) -> Distributions | None:
        """Draft a round; return its distributions, None if one-hot or if all rows are greedy."""
        if self._level1 is None:
            rows.num_drafted.zero_()
            return None
        self._level1.draft(self._batch, rows, is_first=self._num_rounds == 1)
        return None if self._batch.sampling.all_greedy else self._level1.distributions

    def forward(self, rows: Rows, drafted: Distributions | None) -> LevelLogits:
        batch = self._batch
        max_round_tokens = 1 if self._level1 is None else rows.gamma + 1
        max_tokens = int(batch.max_num_tokens.max())
        selects = may_select(self._num_rounds - 1, max_round_tokens, max_tokens)
        return self._level2.forward(batch.sampling, selects)

    def verify(self, rows: Rows, drafted: Distributions | None, logits: LevelLogits) -> None:
        context = self._context
        rate = context.config.synthetic_level1_acceptance
        verify_drafts(rows, logits, drafted, context.sampler, context.counters.sums, rate)
        if logits.distributions is not None:
            export_distributions(self._draft_logits, rows, logits.distributions.logits)

    def end(self) -> None:
        if self._level1 is not None:
            self._level1.end(self._batch, self._context.rows)
        self._level2.scrub(self._batch)
