"""Time that may be spent on finding out."""

# Share of the time: what is lost if nothing comes of it.
SHARE = 0.005


class Allowance:
    """Seconds that have been earned by decoding and not been spent yet.

    Args:
        first: what there is before anything was earned, in steps of plain decoding.
        most: what is kept at most, in the same.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._seconds: float | None = None

    def earn(self, num_steps: int, step_seconds: float) -> None:
        """So many steps, each worth so long of plain decoding."""
        if self._seconds is None:
            self._seconds = self._first * step_seconds
        earned = self._seconds + SHARE * num_steps * step_seconds
        self._seconds = min(earned, self._most * step_seconds)

    def spend(self, seconds: float) -> bool:
        """Spends so much, if there is as much."""
        if self._seconds is None or seconds > self._seconds:
            return False
        self._seconds -= seconds
        return True

    def steps_until(self, seconds: float, step_seconds: float) -> int:
        """Steps after which there is as much."""
        missing = seconds - (self._seconds or 0.0)
        return max(0, int(missing / (SHARE * step_seconds)))
