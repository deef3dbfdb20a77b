"""Levels 1 and 2 for Runner V2: rows of a fixed shape, whose tokens stay on the device."""

import torch

from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.begin import LevelParts, begin_rows, take_slots
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.export_proposal import export_distributions
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.kernels.verification import verify_drafts
from vllm_triforce.verification.masked_logits import masked_logits


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
        if not batch.sampling.all_greedy:
            self._of_places = _Repeated(batch.sampling, parts.rows.gamma + 1)

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

    def forward(
        self, rows: Rows, drafted: Distributions | None
    ) -> torch.Tensor:  # [num_rows, gamma + 1, vocab_size]
        level2, shaping = self._parts.level2, self._batch.sampling.shaping
        logits = level2.forward()
        if shaping is not None:
            logits = shaping.shape_target(logits, level2.inputs, rows)
        return logits.to(self._parts.handed_up.logits.dtype)

    def verify(self, rows: Rows, drafted: Distributions | None, logits: torch.Tensor) -> None:
        parts, sampling, count = self._parts, self._batch.sampling, rows.num_rows
        top, best = logits.max(-1)
        distributions = None
        if not sampling.all_greedy:
            length = logits.shape[1]
            masked, lse = masked_logits(logits.flatten(0, 1), self._of_places)
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
        if self._parts.level1 is not None:
            self._parts.level1.clean(self._batch, self._parts.rows)
        self._parts.level2.clean()


class _Repeated:
    """Sampling parameters, each row's ``length`` times over."""

    def __init__(self, sampling, length: int) -> None:
        def repeat(values):
            return None if values is None else values.repeat_interleave(length)

        self.divisor = repeat(sampling.divisor)
        self.top_k, self.top_p = repeat(sampling.top_k), repeat(sampling.top_p)
        self.min_p = repeat(sampling.min_p)
