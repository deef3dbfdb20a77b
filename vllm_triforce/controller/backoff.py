"""Steps that decode plainly without being asked."""

import math

from vllm_triforce.controller.exploration_budget import SHARE, ExplorationBudget

# Steps without speculation after which its time is that of plain decoding: the first one after
# others is slower, and its way through vLLM is that of a step that may get drafts.
_SETTLED = 2
# Of so many steps at rest one is timed, which takes the beginning of two.
_TIMES_AT_REST = 8
# Steps until a batch that decodes plainly is re-evaluated: the first time, and later at most as
# long as it is not known what that takes; and bounds (a plain step has to be seen; contexts grow).
REEVALUATE_FIRST, REEVALUATE_UNKNOWN, REEVALUATE_EARLIEST, REEVALUATE_LATEST = 8, 32, 4, 128
# Share of the time that re-evaluations may take however often requests come and go.
REEVALUATION_SHARE = 0.01


class SpeculationBackoff:
    """Whether the batch, if it stays as it is, rests in the present step."""

    def __init__(self) -> None:
        self.step = 0
        self._since = 0
        self._until = 0
        self._is_reevaluation = False
        self._num_reevaluations = 0
        """Decisions in a row to go on plainly."""
        self._reevaluations = ExplorationBudget(first=1, most=1, share=REEVALUATION_SHARE)
        self._counted = 0
        """Step up to which re-evaluations have earned their time."""
        self._affordable = 0
        """Step from which another re-evaluation is paid for."""

    def begin_step(self) -> None:
        self._is_reevaluation = self.step == self._until - 1
        self.step += 1

    def begin(self, num_steps: int) -> None:
        """``num_steps`` from now on there is a decision again, and before that none."""
        if self.step + num_steps > self._until:
            self._since, self._until = self.step, self.step + num_steps

    def at_most(self, num_steps: int) -> None:
        """Whatever was decided, in so many steps there is a decision."""
        self._until = min(self._until, self.step + num_steps)

    def start_probe(self) -> None:
        """As long as it takes to see what plain decoding takes."""
        self.begin(_SETTLED + 1)

    def reset(self) -> None:
        """There has to be a decision in this step."""
        self._until = 0
        self.was_worth_it()

    def was_worth_it(self) -> None:
        """A re-evaluation: the next one is due early again."""
        self._num_reevaluations = 0

    def requests_joined(self) -> None:
        """The batch has got requests of which little is known: a re-evaluation is due early again,
        as soon as it is paid for. The step that reads them is no time for it."""
        if not self.is_resting:
            return
        self._num_reevaluations = 0
        self._until = min(self._until, max(self.step + 1, self._affordable))

    def until_reevaluation(self, reevaluation_seconds: float, plain_seconds: float) -> int:
        """Steps after a re-evaluation in vain: few at first, since little is known of a request or
        a passage, and each time twice as many, until they take the share of the time that may be
        spent on finding out.

        Args:
            reevaluation_seconds: what a re-evaluation takes; 0 where that is not known.
        """
        self._reevaluations.earn((self.step - self._counted) * plain_seconds, plain_seconds)
        self._counted = self.step
        self._reevaluations.take(reevaluation_seconds)
        missing = self._reevaluations.missing(reevaluation_seconds)
        soonest = _ceil(missing / (REEVALUATION_SHARE * plain_seconds))
        self._affordable = self.step + soonest
        most = REEVALUATE_UNKNOWN
        if reevaluation_seconds:
            most = min(int(reevaluation_seconds / (SHARE * plain_seconds)), REEVALUATE_LATEST)
        doubled = REEVALUATE_FIRST << min(self._num_reevaluations, 8)
        self._num_reevaluations += 1
        return max(min(doubled, max(most, REEVALUATE_EARLIEST)), soonest)

    @property
    def is_resting(self) -> bool:
        return self.step < self._until

    @property
    def rests_next(self) -> bool:
        """Whether the batch, if it stays as it is, rests in the next step too."""
        return self.step + 1 < self._until

    @property
    def is_reevaluation(self) -> bool:
        """Whether this step only interrupts a rest, for a decision."""
        return self._is_reevaluation and not self.is_resting

    @property
    def is_settled(self) -> bool:
        """Whether this step takes what plain decoding takes."""
        return self.is_resting and self.step - self._since >= _SETTLED

    @property
    def wants_times(self) -> bool:
        """Whether this step's begin is worth taking: at rest few are, since that costs time too."""
        num_steps = self.step - self._since
        return (
            not self.is_resting
            or num_steps == 1  # where the step ends that decided
            or (num_steps - _SETTLED) % _TIMES_AT_REST < 2
        )


def _ceil(num_steps: float) -> int:
    return min(math.ceil(num_steps), REEVALUATE_LATEST)
