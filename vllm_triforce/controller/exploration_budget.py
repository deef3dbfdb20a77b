"""Time that may be spent on finding out."""

# Share of the time: what is lost if nothing comes of it.
SHARE = 0.005


class ExplorationBudget:
    """Seconds that have been earned by decoding and not been spent yet.

    Args:
        first: what there is before anything was earned, in steps of plain decoding.
        most: what is kept at most, in the same.
        share: of the time, that is earned.
    """

    def __init__(self, first: float, most: float, share: float = SHARE) -> None:
        self._first, self._most, self._share = first, most, share
        self._seconds: float | None = None

    def earn(self, seconds: float, step_seconds: float) -> None:
        """Decoding took so long, with steps that take ``step_seconds`` where they are plain."""
        if self._seconds is None:
            self._seconds = self._first * step_seconds
        earned = self._seconds + self._share * seconds
        self._seconds = min(earned, self._most * step_seconds)

    def covers(self, seconds: float) -> bool:
        """Whether there is as much."""
        return self._seconds is not None and seconds <= self._seconds

    def spend(self, seconds: float) -> bool:
        """Spends so much, if there is as much."""
        if not self.covers(seconds):
            return False
        self._seconds -= seconds
        return True

    def give_back(self, seconds: float) -> None:
        """Of what was spent so much has paid for itself."""
        self._seconds = (self._seconds or 0.0) + seconds

    def take(self, seconds: float) -> None:
        """Spends what was spent already, as far as there is so much."""
        self._seconds = max(0.0, (self._seconds or 0.0) - seconds)

    def missing(self, seconds: float) -> float:
        """How much has to be earned before so much can be spent."""
        return max(0.0, seconds - (self._seconds or 0.0))
