"""Steps that decode plainly without being asked."""

# Steps without speculation after which its time is that of plain decoding: the first one after
# others is slower, and its way through vLLM is that of a step that may get drafts.
_SETTLED = 2
# Of so many steps at rest one is timed, which takes the beginning of two.
_TIMES_AT_REST = 8


class Rest:
    """Whether the batch, if it stays as it is, rests in the present step."""

    def __init__(self) -> None:
        self.step = 0
        self._since = 0
        self._until = 0
        self._is_look = False
        self.num_looks = 0
        """Decisions in a row to go on plainly."""

    def begin_step(self) -> None:
        self._is_look = self.step == self._until - 1
        self.step += 1

    def begin(self, num_steps: int) -> None:
        """``num_steps`` from now on there is a decision again, and before that none."""
        if self.step + num_steps > self._until:
            self._since, self._until = self.step, self.step + num_steps

    def begin_short(self) -> None:
        """As long as it takes to see what plain decoding takes."""
        self.begin(_SETTLED + 1)

    def wake(self) -> None:
        """The batch has changed."""
        self._until = 0
        self.num_looks = 0

    @property
    def is_resting(self) -> bool:
        return self.step < self._until

    @property
    def is_look(self) -> bool:
        """Whether this step only interrupts a rest, for a decision."""
        return self._is_look and not self.is_resting

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
