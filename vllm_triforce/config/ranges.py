"""Whether a key's value has the type that its field says, and lies where it may."""

import dataclasses
import math
from typing import Any, get_args


def check_type(config: Any, field: dataclasses.Field) -> None:
    """
    Raises:
        ValueError: it has another.
    """
    value, wanted = getattr(config, field.name), get_args(field.type) or (field.type,)
    if float in wanted:
        wanted += (int,)
    if isinstance(value, bool) != (bool in wanted) or not isinstance(value, wanted):
        raise ValueError(
            f"{field.name}={value!r} must be of type {wanted[0].__name__}, "
            f"not {type(value).__name__}"
        )


def check_range(config: Any, name: str, low: float, high: float | None = None) -> None:
    """None, for a default, is always right.

    Raises:
        ValueError: the value is out of range.
    """
    value = getattr(config, name)
    if value is None:
        return
    if not low <= value < math.inf or (high is not None and value > high):
        bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}")
