"""Selection policies: each further module here defines one, of the module's name.

The names are known without loading a policy, and so without torch: ``POLICIES`` and what policies
are made of are loaded when they are asked for.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_triforce.selection.policy import SelectionPolicy
    from vllm_triforce.selection.summaries import Summary

    POLICIES: dict[str, type[SelectionPolicy]]

_SHARED = {"SelectionPolicy": "policy", "Summary": "summaries"}

POLICY_NAMES = tuple(
    sorted(
        module.name
        for module in pkgutil.iter_modules(__path__)
        if module.name not in _SHARED.values()
    )
)

__all__ = ["POLICIES", "POLICY_NAMES", "SelectionPolicy", "Summary"]


def __getattr__(name: str) -> Any:
    if name == "POLICIES":
        found: Any = {policy: _load(policy) for policy in POLICY_NAMES}
    elif name in _SHARED:
        found = getattr(importlib.import_module(f"{__name__}.{_SHARED[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _load(name: str) -> "type[SelectionPolicy]":
    """The policy that a module of this name defines.

    Raises:
        ValueError: it defines none of that name.
    """
    from vllm_triforce.selection.policy import SelectionPolicy

    module = importlib.import_module(f"{__name__}.{name}")
    for found in vars(module).values():
        is_policy = isinstance(found, type) and issubclass(found, SelectionPolicy)
        if is_policy and vars(found).get("name") == name:
            return found
    raise ValueError(
        f"{module.__file__} has no class over SelectionPolicy with name = {name!r}; name the "
        "policy as its file"
    )
