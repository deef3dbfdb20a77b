"""The methods that can be compared: a name, and the keys of vLLM's ``speculative_config``.

A new method is one entry of ``METHODS``.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.keys import METHOD as TRIFORCE
from vllm_triforce_bench.bench.errors import BadInput

STOCK = "stock"


@dataclass(frozen=True)
class Method:
    """A speculative method that can be compared."""

    title: str
    """For tables and figures."""
    keys: Mapping[str, Any] | None
    """Of ``speculative_config``; None for no speculation."""
    needs_draft: bool = False
    needs_module: str = ""
    """A package that vLLM itself does not install."""
    install: str = ""

    @property
    def name(self) -> str | None:
        """vLLM's name of the method; the one whose keys a user can set."""
        return None if self.keys is None else self.keys["method"]


METHODS: dict[str, Method] = {
    STOCK: Method("stock vLLM", None),
    "draft_model": Method(
        "stock draft_model",
        {"method": "draft_model", "num_speculative_tokens": 3},
        needs_draft=True,
    ),
    "ngram": Method(
        "stock ngram",
        {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
    ),
    "suffix": Method(
        "stock suffix",
        {"method": "suffix"},
        needs_module="arctic_inference",
        install="pip install arctic-inference==0.1.1",
    ),
    # As a user gets it.
    "triforce": Method("TriForce", {"method": TRIFORCE}),
    # Its parts, switched off one by one; the controller must not switch off the rest.
    "triforce:all": Method(
        "TriForce, all levels always", {"method": TRIFORCE, "levels": "1,2,3", "adaptive": False}
    ),
    "triforce:level1": Method(
        "TriForce, level 1 only", {"method": TRIFORCE, "levels": "1,3", "adaptive": False}
    ),
    "triforce:retrieval": Method(
        "TriForce, retrieval only", {"method": TRIFORCE, "levels": "2,3", "adaptive": False}
    ),
    "triforce:streaming": Method(
        "TriForce, streaming for retrieval",
        {"method": TRIFORCE, "selection": "streaming", "adaptive": False},
    ),
}


@dataclass(frozen=True)
class Variant:
    """A method with what the grid varies about it; one engine for each dtype."""

    method: str
    budget: int | None
    """``retrieval_budget`` in tokens; None where the method has none."""
    keys: dict[str, Any] | None = field(compare=False)
    """The whole ``speculative_config``."""
    label: str = field(compare=False)

    @property
    def is_stock(self) -> bool:
        return self.method == STOCK

    @property
    def is_triforce(self) -> bool:
        return self.keys is not None and self.keys["method"] == TRIFORCE


def check_names(names: list[str]) -> None:
    """Raises BadInput: a name is unknown or said twice."""
    for name in names:
        if name not in METHODS:
            raise BadInput(f"method {name!r} is unknown; known: {', '.join(METHODS)}")
        if names.count(name) > 1:
            raise BadInput(f"method {name!r} is named {names.count(name)} times; name it once")


def available(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Which methods can run here.

    Returns:
        Those, stock first (it is always measured: every ratio is to it), and why each other is
        left out.
    """
    left_out = {}
    for name in names:
        method = METHODS[name]
        if method.needs_module and importlib.util.find_spec(method.needs_module) is None:
            left_out[name] = f"{method.needs_module} is not installed ({method.install})"
    kept = [name for name in names if name not in left_out and name != STOCK]
    return [STOCK, *kept], left_out


def variants(
    names: list[str], budgets: list[int], draft: str | None, own_keys: Mapping[str, dict]
) -> list[Variant]:
    """Every engine of a dtype: each method, those of TriForce for each budget.

    Args:
        own_keys: a user's ``speculative_config`` keys by vLLM's name of the method.

    Raises:
        BadInput: keys that TriForce refuses, or a draft model that is needed and missing.
    """
    found = []
    for name in names:
        method = METHODS[name]
        if method.needs_draft and not draft:
            raise BadInput(f"method {name!r} needs a draft model; give --draft MODEL or drop it")
        if method.keys is None:
            found.append(Variant(name, None, None, method.title))
            continue
        is_triforce = method.name == TRIFORCE
        for budget in budgets if is_triforce else [None]:
            keys = {**method.keys, **own_keys.get(method.name or "", {})}
            label = method.title
            if is_triforce:
                keys["retrieval_budget"] = budget
                _check_triforce(name, keys)
                label += f", budget {budget}" if len(budgets) > 1 else ""
            if draft and (is_triforce or method.needs_draft):
                keys["model"] = draft
            found.append(Variant(name, budget, keys, label))
    return found


def _check_triforce(name: str, keys: dict[str, Any]) -> None:
    own = {key: value for key, value in keys.items() if key not in ("method", "model")}
    try:
        TriForceConfig.from_speculative_config(own)
    except ValueError as error:
        raise BadInput(f"method {name!r}: {error}") from error
