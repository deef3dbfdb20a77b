"""How long a measurement goes on, in words: the same in all tools."""


def time_left(seconds: float | None) -> str:
    """
    Args:
        seconds: None where nothing is done yet that it could be told from.
    """
    if seconds is None:
        return "time left: not known yet"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left"
