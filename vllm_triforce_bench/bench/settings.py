"""Settings that both benchmarks share, and types of their options."""

import argparse
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator

from vllm_triforce_bench.options import BadInput, Tokens, checked

AUTO = "auto"
"""The dtype in which vLLM serves the model (``model_facts.served_dtypes``)."""
DTYPES = (AUTO, "float32", "bfloat16", "float16")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
GIB = 1 << 30
EACH = 0
"""The context of a dataset's own prompts, each as long as it is."""
# Positions beyond the longest output, for proposals.
PROPOSAL_ROOM = 64

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings(ABC):
    """Checked settings; made without loading vLLM or a model."""

    target: str
    draft: str | None
    prompts: str | None
    top_p: float
    seed: int
    engine_keys: dict[str, Any]
    """The user's engine arguments, for every engine alike."""
    kv_cache_gib: float | None

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens of the longest request, and room for proposals."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(cls: type[S], args: argparse.Namespace, **values) -> S:
    """Make the settings from the options of their names, and from other values."""
    values["engine_keys"] = args.engine
    names = [field.name for field in fields(cls) if field.name not in values]
    return cls(**{name: getattr(args, name) for name in names}, **values)


def add_options(group, *options: tuple) -> None:
    """Add options to argparse's group: name, type of the value, default and help of each."""
    for name, kind, default, text in options:
        group.add_argument(name, type=checked(kind), default=default, help=text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadInput("write a JSON object such as '{\"gamma\": 3}'")
    return value


def _method_keys(text: str) -> dict[str, Any]:
    keys = _json_object(text)
    for key in ("method", "model", "retrieval_budget"):
        if key in keys:
            raise BadInput(
                f"key {key!r} is set by the benchmark; use --methods, --draft and --budgets"
            )
    return keys


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise BadInput("there is no such file or folder")
    return path


def _word(word: str, meaning: Any) -> WrapValidator:
    return WrapValidator(lambda value, convert: meaning if value == word else convert(value))


ExistingPath = Annotated[str, AfterValidator(_existing)]
Context = Annotated[Tokens, Field(ge=2), _word("each", EACH)]
Budget = Annotated[Tokens, Field(ge=1), _word("default", None)]
"""A ``retrieval_budget``; None for TriForce's default."""
RequestRate = Annotated[float, Field(gt=0, allow_inf_nan=False), _word("inf", None)]
"""Requests per second; None for a new one as soon as there is room."""
JsonObject = Annotated[dict[str, Any], BeforeValidator(_json_object)]
MethodKeys = Annotated[dict[str, Any], BeforeValidator(_method_keys)]
"""The user's ``speculative_config`` keys, without those that the benchmark sets."""
