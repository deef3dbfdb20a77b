"""Settings that both benchmarks share, and parsers of option values."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_triforce_bench.bench import BadInput

AUTO = "auto"
"""The dtype in which vLLM serves the model (``model_facts.served_dtypes``)."""
DTYPES = (AUTO, "float32", "bfloat16", "float16")
GIB = 1 << 30
# Positions beyond the longest output, for proposals.
PROPOSAL_ROOM = 64


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


def common_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Read the fields of ``Settings``."""
    return dict(
        target=args.target,
        draft=args.draft or None,
        prompts=args.prompts,
        top_p=args.top_p,
        seed=args.seed,
        engine_keys=json_object("--engine", args.engine),
        kv_cache_gib=args.kv_cache_gib,
    )


def check_at_least(option: str, value: float | None, low: float) -> None:
    if value is not None and not low <= value < math.inf:
        raise BadInput(f"{option}: {value} is out of range; it must be at least {low}")


def method_keys(option: str, text: str) -> dict[str, Any]:
    """Parse the user's ``speculative_config`` keys, without those that the benchmark sets."""
    keys = json_object(option, text)
    for key in ("method", "model", "retrieval_budget"):
        if key in keys:
            raise BadInput(
                f"key {key!r} in {option} is set by the benchmark; use --methods, --draft and "
                "--budgets"
            )
    return keys


def list_of(option: str, text: str, kind: Callable[[str], Any]) -> list:
    """Parse values with commas between them."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise BadInput(f"{option} is empty; give values with commas between them")
    try:
        values = [kind(part) for part in parts]
    except ValueError as error:
        raise BadInput(f"{option} {text!r}: {error}") from error
    if len(set(values)) < len(values) and kind is not str:
        raise BadInput(f"{option} {text!r} names a value twice; name it once")
    return values


def num_tokens(text: str) -> int:
    """Parse ``4096`` or ``4K``."""
    number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    try:
        return int(number) * factor
    except ValueError:
        raise ValueError(
            f"{text!r} is not a number of tokens; write 4096 or 4K (4 x 1024)"
        ) from None


def json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{option} {text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadInput(f"{option} {text!r} must be a JSON object such as '{{\"gamma\": 3}}'")
    return value
