"""What the controller learns: from what was accepted, and from how long things took."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.acceptance import Acceptance
from vllm_triforce.controller.cost_model import CostModel
from vllm_triforce.controller.measurements import StepTime
from vllm_triforce.controller.options import Candidate, Options
from vllm_triforce.controller.routes import LEVELS, PLAIN, Choice, SourceTraits
from vllm_triforce.controller.trials import Trials


@dataclass
class Planned:
    """What the proposals of a step were expected to be."""

    num_drafts: int
    seconds: float
    """That they and their verification add, without what is learnt from comparing it."""

    @classmethod
    def of(
        cls,
        options: Options,
        rows: np.ndarray,
        columns: np.ndarray,
        candidates: Sequence[Candidate],
        model: CostModel,
    ) -> "Planned":
        """
        Args:
            rows, columns: [num_proposing], of the options that were chosen.
        """
        lengths = options.lengths[rows, columns]
        # What is read once is no part of it: such steps are not compared, or
        # reads_window() adds it.
        seconds = (options.seconds - options.amortized_setup_s)[rows, columns]
        verified = sum(
            int(length) * model.draft_seconds(candidates[row].is_greedy)
            for row, length in zip(rows, lengths)
        )
        return cls(int(lengths.sum()), float(seconds.sum()) - verified)

    def add(self, seconds: float, num_drafts: int = 0) -> None:
        """More was planned."""
        self.seconds += seconds
        self.num_drafts += num_drafts


class Learning:
    """What is known, and what is told of it; ``Controller`` decides by it.

    Args:
        sources: level 1's, the preferred one first.
    """

    def __init__(self, config: ResolvedConfig, sources: Sequence[SourceTraits]) -> None:
        self.config = config
        self.sources = sorted(sources, key=lambda source: source.takes_passes)
        """Those that take no passes first: they win where others promise the same."""
        self.round_drafts = 2 * any(source.takes_passes for source in sources)
        """Passes of the draft in a round of levels 1 and 2."""
        self.acceptance = Acceptance(sources)
        self.measured: CostModel | None = None
        """What this rank measured; None where nothing is chosen."""
        self.model: CostModel | None = None
        """What decisions are made by."""
        self._trials = Trials()
        self.planned: Planned | None = None
        self._chosen: dict[str, tuple[Choice, float]] = {}
        """What each request did last, and how many tokens that was expected to gain."""

    @property
    def chooses(self) -> frozenset[str]:
        return self.config.choices if self.model is not None else frozenset()

    def observe_round(
        self,
        request_id: str,
        source: str | None,
        confidence: int | None,
        drafted: int,
        accepted: int,
    ) -> None:
        """Level 2 tested ``drafted`` tokens of a source; of none, its own alone."""
        for rates in self.acceptance.both(request_id):
            rates.add_round(accepted + 1)
            if source is not None and confidence is not None:
                rates.of(source, True, confidence).add(drafted, accepted)
            for other in self.sources:
                if other.takes_passes and other.name != source:
                    rates.of(other.name, True, 0).fade()

    def observe_times(
        self,
        num_rows: int,
        longest: int,
        num_drafts: list[int],
        num_tests: int,
        is_greedy: bool,
        level1_seconds: float,
        level2_seconds: float,
        other_seconds: float,
    ) -> None:
        """How long a round took.

        Args:
            longest: most tokens that a request had tested.
            num_drafts: tokens of each request that asked the draft model.
            num_tests: tokens that level 2 gave logits for.
            is_greedy: whether all requests are.
        """
        measured = self.measured
        measured.observe_round(num_rows, level1_seconds + level2_seconds + other_seconds)
        measured.observe_test(num_tests, is_greedy, other_seconds)
        measured.observe("level 2", measured.level2(num_rows, longest + 1), level2_seconds)
        if any(num_drafts):
            predicted = max(num_drafts) * measured.draft(len(num_drafts))
            measured.observe("level 1", predicted, level1_seconds)

    def observe_rounds(
        self, request_id: str, source: str | None, num_rounds: int, accepted: int, rejected: int
    ) -> None:
        """Level 2 tested tokens of a source in so many rounds, and rejected one in ``rejected`` of
        them."""
        if num_rounds == 0:
            return
        for rates in self.acceptance.both(request_id):
            for _ in range(num_rounds):
                rates.add_round((accepted + num_rounds) / num_rounds)
            if source is not None:
                rate = rates.of(source, True, 0)
                rate.add(accepted, accepted)
                for _ in range(rejected):
                    rate.add(1, 0)

    def chosen_for(self, request_id: str) -> tuple[Choice, float]:
        """What it does by the last decision, and how many tokens that is expected to gain."""
        return self._chosen.get(request_id, (PLAIN, 0.0))

    def await_outcomes(self, request_ids: Iterable[str]) -> None:
        """There may be decisions before it is known what came of theirs."""
        self._trials.await_outcomes(request_ids)

    def outcome_lost(self, request_id: str) -> None:
        """Nothing came of its proposal, or nobody will know."""
        self._trials.discard(request_id)

    def observe_full_pass(
        self,
        request_id: str,
        drafted: int,
        accepted: int,
        made: tuple[Choice, float] | None = None,
    ) -> None:
        """Level 3 tested ``drafted`` tokens of the request's proposal.

        Args:
            made: what ``chosen_for()`` gave when it was decided; without it, now.
        """
        choice, expected = made or self.chosen_for(request_id)
        if choice is PLAIN or not self.chooses:
            return
        self._trials.on_verified(request_id, drafted, accepted)
        if expected and drafted == choice.num_tokens:
            is_greedy = self.acceptance.is_greedy(request_id)
            gain = self.acceptance.gains[choice.route, is_greedy]
            gain.add(expected / gain.value, accepted)
        for rates in self.acceptance.both(request_id):
            if choice.route == LEVELS:
                rates.level2.add(drafted, accepted)
            elif choice.confidence is not None:
                straight = rates.of(choice.route, False, choice.confidence)
                straight.add(drafted, accepted)
                if straight.value > rates.level2.value:
                    rates.doubt_level2()

    def observe_step(self, step: StepTime, planned: Planned | None) -> None:
        """A step has ended; ``planned`` is what ``take_plan()`` gave for its drafts."""
        if step.num_drafts:
            if planned is None or planned.num_drafts != step.num_drafts:
                return
            step.planned_seconds = planned.seconds
        self.measured.observe_step(step)

    def take_plan(self) -> Planned | None:
        """Of the proposals that are verified next."""
        planned, self.planned = self.planned, None
        return planned

    def reads_window(self, num_tokens: int) -> None:
        """The present proposal takes longer, since the draft reads so many tokens for it that it
        has not seen."""
        if self.planned is not None:
            self.planned.add(self.model.reading_window(num_tokens))

    def forget_plan(self) -> None:
        """The present proposal takes longer for a reason that will not be again."""
        self.planned = None

    def round_seconds(self, num_rows: int) -> float:
        """A request's share of a round of level 1 and level 2."""
        return self.model.round_seconds(num_rows, self.round_drafts) / num_rows

    @property
    def num_requests(self) -> int:
        held = len(self._chosen), len(self.acceptance.requests)
        return max(*held, self._trials.num_requests)

    def release(self, request_id: str) -> None:
        self.acceptance.release(request_id)
        self._trials.release(request_id)
        self._chosen.pop(request_id, None)
