"""Values of the tools' options, converted and checked by pydantic."""

import argparse
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

T = TypeVar("T")


class BadInput(ValueError, argparse.ArgumentTypeError):
    """An argument, file or folder that the user can mend; raised before any model loads."""


def checked(kind: Any) -> Callable[[Any], Any]:
    """Make the function that converts a value to a type; argparse puts the option before errors.

    Args:
        kind: a type, or one with pydantic's constraints.
    """
    adapter = TypeAdapter(kind)

    def convert(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise BadInput("; ".join(map(_describe, error.errors()))) from error

    return convert


def _describe(error: Any) -> str:
    """Format an error of pydantic: field, value, and reason or remedy."""
    names = [part for part in error["loc"] if isinstance(part, str)]
    if error["type"] == "missing":
        return f"{names[-1]} is missing"
    reason = error.get("ctx", {}).get("error") or error["msg"][0].lower() + error["msg"][1:]
    return f"{' '.join([*names, str(error['input'])])} is not accepted: {reason}"


def split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        raise ValueError("give values with commas between them")
    return parts


def _check_once(values: list) -> list:
    if len(set(values)) < len(values) and not isinstance(values[0], str):
        raise ValueError("name each value once")
    return values


def _tokens(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    number, factor = (value[:-1], 1024) if value[-1:] in ("k", "K") else (value, 1)
    try:
        return int(number) * factor
    except ValueError:
        raise ValueError("write a number of tokens, such as 4096 or 4K (4 x 1024)") from None


CommaList = Annotated[list[T], BeforeValidator(split), AfterValidator(_check_once)]
"""Values with commas between them."""
Tokens = Annotated[int, BeforeValidator(_tokens)]
"""``4096`` or ``4K``."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
