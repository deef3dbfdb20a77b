"""Levels 1 and 2 for Runner V2: rows of a fixed shape, whose tokens stay on the device."""

from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.begin import LevelParts, begin_rows, take_slots
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.export_proposal import export_distributions
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.verification import verify_drafts


class DeviceLevels:
    """One proposal: ``core/propose.py``'s levels.

    A round adds 1 to ``gamma + 1`` tokens to each row. The host launches as many rounds as were
    planned, without a word from the device: rows that are finished take part to the end and are
    left as they are, and those that are not end with what they have. When they end depends on
    tokens before that, never on the one that would come, so no proposal is bent by it.
    """

    def __init__(self, parts: LevelParts, batch: DeviceBatch) -> None:
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
        begin_rows(parts, batch, slots, due)
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
        verify_drafts(rows, logits, drafted, rows.drawing, parts.race, parts.counters)
        if logits.distributions is not None:
            export_distributions(parts.handed_up, rows, logits.distributions.logits)

    def end(self) -> None:
        if self._parts.level1 is not None:
            self._parts.level1.clean(self._batch, self._parts.rows)
        self._parts.level2.clean()
