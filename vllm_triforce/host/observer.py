"""What a proposal took and gained, for the counters and for the controller."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_triforce.controller import Controller
from vllm_triforce.host.draft_batch import DraftBatch
from vllm_triforce.host.level1 import SourcedDraft
from vllm_triforce.host.retrieval import RetrievalLevel
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.verification.inner import Verified


class HostObserver:
    """Of one proposal of levels 1 and 2: ``core/propose.py``'s observer.

    Args:
        began: when it began, by ``time.perf_counter()``: what comes before the loop is counted with
            selection.
    """

    def __init__(
        self,
        batch: DraftBatch,
        level2: RetrievalLevel,
        controller: Controller,
        counters: LevelCounters,
        began: float,
    ) -> None:
        self._batch = batch
        self._controller = controller
        self._counters = counters
        self._seconds: dict[str, float] = {}
        self._began = began
        # Level 2 looks through a prompt once: what that takes is no measure of later proposals.
        self._is_first = not all(level2.knows(name) for name in batch.request_ids)
        self._is_usual, self._num_read = not self._is_first, 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._began if name == "selection" else time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._seconds[name] = seconds
        self._counters.add_time(name, seconds)
        if name == "selection":
            if self._controller.measured is not None and not self._is_first:
                self._controller.measured.observe_begin(len(self._batch), seconds)
            self._began = time.perf_counter()

    def round_ended(self, rows: list[int], sourced: SourcedDraft, verified: Verified) -> None:
        drafted = sourced.drafted
        self._counters.add_inner_round(drafted.token_ids, verified.num_accepted)
        if self._controller.chooses:
            self._learn_acceptance(rows, sourced, verified.num_accepted)
            if not (self._is_first or drafted.is_first or drafted.num_read):
                self._learn_times(rows, sourced)
        self._is_first, self._is_usual = False, self._is_usual and not drafted.is_first
        self._num_read += drafted.num_read

    def proposal_ended(self, lengths: list[int]) -> None:
        """
        Args:
            lengths: that were planned.
        """
        if not self._is_usual:
            self._controller.forget_plan()
        elif self._num_read:
            self._controller.reads_window(self._num_read)
        elif self._controller.chooses:
            seconds = time.perf_counter() - self._began
            self._controller.observe_proposal(self._batch.request_ids, lengths, seconds)

    def _learn_acceptance(self, rows, sourced: SourcedDraft, num_accepted: list[int]) -> None:
        for row, source, confidence, drafted, accepted in zip(
            rows,
            sourced.sources,
            sourced.confidences,
            sourced.drafted.token_ids,
            num_accepted,
        ):
            name = self._batch.request_ids[row]
            self._controller.observe_round(name, source, confidence, len(drafted), accepted)

    def _learn_times(self, rows, sourced: SourcedDraft) -> None:
        tokens = sourced.drafted.token_ids
        self._controller.observe_times(
            len(rows),
            max(map(len, tokens)),
            [len(t) for t, with_model in zip(tokens, sourced.with_model) if with_model],
            sum(map(len, tokens)) + len(rows),
            self._batch.sampling.all_greedy,
            self._seconds["level 1"],
            self._seconds["level 2"],
            self._seconds["verification"],
        )
