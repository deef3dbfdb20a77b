"""Methods by name, with their keys of vLLM's ``speculative_config``.

A new method is one entry of ``METHODS``, and its colour in ``colours.py``.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.keys import METHOD as TRIFORCE
from vllm_triforce.config.synthetic import RATES_KEY, SYNTHETIC, extend_rates
from vllm_triforce.config.triforce_config import LEVEL1_KEYS
from vllm_triforce_bench.options import BadInput

STOCK, CONTROL = "stock", "control"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Method:
    """A speculative method.

    Args:
        title: name in tables and figures.
        keys: keys of ``speculative_config``; None for no speculation.
        needs_module: module that vLLM does not install, and the command that does.
    """

    title: str
    keys: Mapping[str, Any] | None
    needs_draft: bool = False
    needs_module: tuple[str, str] | None = None


def _stock(name: str, keys: Mapping[str, Any], **needs: Any) -> Method:
    return Method(f"stock {name}", {"method": name, **keys}, **needs)


def _triforce(title: str, is_always: bool = False, **keys: Any) -> Method:
    """Make TriForce with keys.

    Args:
        is_always: True for fixed lengths at any context.
    """
    title = f"TriForce, {title}" if title else "TriForce"
    return Method(title, {"method": TRIFORCE} | (_ALWAYS if is_always else {}) | keys)


_ALWAYS = {"adaptive": False, "min_context": 0}
_NGRAM = {"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
METHODS: dict[str, Method] = {
    STOCK: Method("stock vLLM", None),
    "draft_model": _stock("draft_model", {"num_speculative_tokens": 3}, needs_draft=True),
    "eagle3": _stock("eagle3", {"num_speculative_tokens": 3}, needs_draft=True),
    "mtp": _stock("mtp", {"num_speculative_tokens": 1}),
    "ngram": _stock("ngram", _NGRAM),
    "suffix": _stock(
        "suffix", {}, needs_module=("arctic_inference", "pip install arctic-inference==0.1.1")
    ),
    # The defaults.
    "triforce": _triforce(""),
    "triforce:copy": _triforce("level 2 in bfloat16", level2_model="bfloat16"),
    "triforce:lookup": _triforce("no draft model", draft_sources="prompt_lookup"),
    # Levels switched off one by one; nothing may switch off the rest.
    "triforce:all": _triforce("all levels always", True, levels="1,2,3"),
    "triforce:level1": _triforce("level 1 only", True, levels="1,3"),
    "triforce:retrieval": _triforce("retrieval only", True, levels="2,3"),
    "triforce:fp8": _triforce("all levels, level 2 in fp8", True, level2_model="fp8"),
    "triforce:streaming": _triforce("streaming for retrieval", True, selection="streaming"),
}


@dataclass(frozen=True)
class Variant:
    """A method at one retrieval budget; one engine for each dtype.

    Args:
        budget: ``retrieval_budget`` in tokens; None for the default, and for other methods.
        keys: the whole ``speculative_config``; None for stock vLLM.
    """

    method: str
    budget: int | None
    keys: dict[str, Any] | None = field(compare=False)
    label: str = field(compare=False)

    @property
    def is_triforce(self) -> bool:
        return self.keys is not None and self.keys["method"] == TRIFORCE


CONTROL_VARIANT = Variant(CONTROL, None, None, "stock vLLM again")
"""A second stock vLLM, whose ratios are the machine's alone."""


def check_name(name: str) -> str:
    if name not in METHODS:
        raise BadInput(f"known are {', '.join(METHODS)}")
    return name


def available(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the methods that can run here, and the reason for each other one.

    Stock vLLM is first, named or not: every ratio is to it.
    """
    left_out = {}
    for name in names:
        module, command = METHODS[name].needs_module or ("", "")
        if module and importlib.util.find_spec(module) is None:
            left_out[name] = f"{module} is not installed ({command})"
    return [name for name in dict.fromkeys([STOCK, *names]) if name not in left_out], left_out


def variants(
    names: list[str],
    budgets: Sequence[int | None],
    target: str,
    draft: str | None,
    user_keys: Mapping[str, dict],
    synthetic: Sequence[float] | None = None,
) -> list[Variant]:
    """List the engines of a dtype: one for each method, and for TriForce one for each budget.

    Args:
        user_keys: the user's ``speculative_config`` keys, by vLLM's name of the method.
        synthetic: acceptance of level 1's tokens and of level 2's, whatever the models say.

    Raises:
        BadInput: TriForce refuses its keys, a draft model is missing, or it is the target.
    """
    variants = []
    for name in names:
        method = METHODS[name]
        if method.needs_draft and not draft:
            raise BadInput(f"method {name!r} needs a draft model; give --draft MODEL or drop it")
        if method.needs_draft and draft == target:
            raise BadInput(
                f"method {name!r} cannot have the target itself as --draft; stock vLLM runs a "
                "target's own MTP layers by the method 'mtp'"
            )
        if method.keys is None:
            variants.append(Variant(name, None, None, method.title))
            continue
        is_triforce = method.keys["method"] == TRIFORCE
        for budget in budgets if is_triforce else [None]:
            keys = {**method.keys, **user_keys.get(method.keys["method"], {})}
            has_drafts = method.keys.get("levels") != "2,3"
            if not has_drafts:  # the user's keys are for all methods
                keys = {key: keys[key] for key in keys if key not in LEVEL1_KEYS}
            if "draft_sources" in method.keys:
                has_drafts, keys["draft_sources"] = False, method.keys["draft_sources"]
            label = method.title
            if is_triforce:
                if budget is not None:
                    keys["retrieval_budget"] = budget
                try:
                    TriForceConfig.from_speculative_config(
                        {key: keys[key] for key in keys if key not in ("method", "model")}
                    )
                except ValueError as error:
                    raise BadInput(f"method {name!r}: {error}") from error
                label += f", budget {budget or 'by default'}" if len(budgets) > 1 else ""
            if synthetic is not None:
                label += f", synthetic {synthetic[0]:g}, {synthetic[1]:g}"
                keys |= _synthetic_keys(name, keys, synthetic)
            if draft and (method.needs_draft or (is_triforce and has_drafts)):
                keys["model"] = draft
            variants.append(Variant(name, budget, keys, label))
    return variants


def _synthetic_keys(name: str, keys: dict[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """Make the keys of acceptance at given rates; stock vLLM's drafts are accepted as level 1's."""
    of_level1, of_level2 = rates
    result: dict[str, Any] = {"rejection_sample_method": SYNTHETIC}
    if keys["method"] == TRIFORCE:
        if keys.get("levels") != "2,3":
            result["synthetic_level1_acceptance"] = of_level1
        return result | {RATES_KEY: [of_level2]}
    if "num_speculative_tokens" not in keys:
        raise BadInput(
            f"method {name!r} needs a length for --synthetic-acceptances; give --{name} "
            "'{\"num_speculative_tokens\": 8}'"
        )
    return result | {RATES_KEY: extend_rates([of_level1], keys["num_speculative_tokens"])}


def with_synthetic_test(variants: list[Variant], left_out: dict[str, str]) -> list[Variant]:
    """Leave out vLLM's methods where it has no acceptance at given rates."""
    from vllm_triforce.config.checks import has_fixed_shapes

    if has_fixed_shapes():
        return variants
    lack_it = [v for v in variants if v.keys is not None and not v.is_triforce]
    left_out |= {v.method: "vLLM has no synthetic acceptance on a CPU" for v in lack_it}
    return [variant for variant in variants if variant not in lack_it]


def check_copies(variants: list[Variant], dtypes: Sequence[str]) -> None:
    """Raise BadInput if level 2's copy has no fewer bits a weight than the target."""
    for variant in variants:
        copy = (variant.keys or {}).get("level2_model")
        for dtype in dtypes:
            if copy in DTYPE_BYTES and DTYPE_BYTES[copy] >= DTYPE_BYTES[dtype]:
                raise BadInput(
                    f"method {variant.method!r}: level 2 in {copy} saves nothing where the target "
                    f"is served in {dtype}; give --dtypes float32, or --triforce "
                    """'{"level2_model": "fp8"}'"""
                )
