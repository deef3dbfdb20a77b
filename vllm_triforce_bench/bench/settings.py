"""Settings that both benchmarks share, and parsers of option values."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from vllm_triforce_bench.bench import BadInput

AUTO = "auto"
"""The dtype in which vLLM serves the model (``model_facts.served_dtypes``)."""
DTYPES = (AUTO, "float32", "bfloat16", "float16")
GIB = 1 << 30
EACH = 0
"""The context of a dataset's own prompts, each as long as it is."""
# Positions beyond the longest output, for proposals.
PROPOSAL_ROOM = 64

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Validated settings; made without loading vLLM or a model."""

    target: str
    draft: str | None
    prompts: str | None
    top_p: float
    seed: int
    engine_keys: dict[str, Any]
    """The user's engine arguments, for every engine alike."""
    kv_cache_gib: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, dtypes: list[str]) -> None:
        """Raise BadInput if a value is out of range."""
        if not 0 < self.top_p <= 1:
            raise BadInput(f"--top-p {self.top_p} is out of range; it must be in (0, 1]")
        if self.kv_cache_gib is not None and not 1 <= self.kv_cache_gib * GIB < math.inf:
            raise BadInput(
                f"--kv-cache-gib {self.kv_cache_gib} is no size; give a number of GiB above 0"
            )
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise BadInput(f"--dtypes: {dtype!r} is unknown; known: {', '.join(DTYPES)}")
        if self.prompts is not None and not Path(self.prompts).exists():
            raise BadInput(f"--prompts {self.prompts}: there is no such file or folder")


def read(cls: type[S], args: argparse.Namespace, **values) -> S:
    """Make the settings from the options of their names, and from other values."""
    values["engine_keys"] = args.engine
    names = [field.name for field in fields(cls) if field.name not in values]
    return cls(**{name: getattr(args, name) for name in names}, **values)


def add_options(group, *options: tuple) -> None:
    """Add options to argparse's group: name, parser of the value, default and help of each."""
    for name, kind, default, text in options:
        group.add_argument(name, type=kind, default=default, help=text)


# Parsers of option values; argparse puts the option's name before their messages.


def at_least(low: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Make the parser of a number that is not below ``low``."""

    def parse(text: str):
        try:
            value = kind(text)
        except BadInput:
            raise
        except ValueError as error:
            raise BadInput(f"{text!r}: {error}") from error
        if not low <= value < math.inf:
            raise BadInput(f"{value} is out of range; it must be at least {low}")
        return value

    return parse


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list]:
    """Make the parser of values with commas between them."""

    def parse(text: str) -> list:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise BadInput("is empty; give values with commas between them")
        try:
            values = [kind(part) for part in parts]
        except BadInput:
            raise
        except ValueError as error:
            raise BadInput(f"{text!r}: {error}") from error
        if len(set(values)) < len(values) and kind is not str:
            raise BadInput(f"{text!r} names a value twice; name it once")
        return values

    return parse


def num_tokens(low: float = -math.inf) -> Callable[[str], int]:
    """Make the parser of ``4096`` or ``4K``."""

    def parse(text: str) -> int:
        number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
        try:
            return int(number) * factor
        except ValueError:
            raise BadInput(
                f"{text!r} is not a number of tokens; write 4096 or 4K (4 x 1024)"
            ) from None

    return at_least(low, parse)


def context(text: str) -> int:
    """Parse the tokens of a prompt; ``EACH`` for a dataset's own prompts."""
    return EACH if text == "each" else num_tokens(2)(text)


def budget(text: str) -> int | None:
    """Parse a ``retrieval_budget``; None for TriForce's default."""
    return None if text == "default" else num_tokens(1)(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadInput(f"{text!r} must be a JSON object such as '{{\"gamma\": 3}}'")
    return value


def method_keys(text: str) -> dict[str, Any]:
    """Parse the user's ``speculative_config`` keys, without those that the benchmark sets."""
    keys = json_object(text)
    for key in ("method", "model", "retrieval_budget"):
        if key in keys:
            raise BadInput(
                f"key {key!r} is set by the benchmark; use --methods, --draft and --budgets"
            )
    return keys
