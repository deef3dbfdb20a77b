"""Selection policies: each further module here defines one, of the module's name. Other packages
add theirs by an entry point of the group ``vllm_triforce.selection_policies``.

The names are known without loading a policy, and so without torch; what policies are made of is
loaded when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_triforce.registry import Registry

if TYPE_CHECKING:
    from vllm_triforce.selection.policy import SelectionPolicy, Summary

POLICIES = Registry(
    __name__,
    base=("policy", "SelectionPolicy"),
    group="vllm_triforce.selection_policies",
)

__all__ = ["POLICIES", "SelectionPolicy", "Summary"]


def __getattr__(name: str) -> Any:
    if name not in ("SelectionPolicy", "Summary"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"{__name__}.policy"), name)
    return globals()[name]
