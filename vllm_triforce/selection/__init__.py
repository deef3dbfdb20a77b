"""Selection policies: every module but ``policy`` defines the one it is named after.

Other packages add policies by an entry point of the group ``vllm_triforce.selection_policies``.
Names are read without importing a policy or torch. ``SelectionPolicy`` and ``Summary`` are
imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_triforce.registry import Registry

if TYPE_CHECKING:
    from vllm_triforce.selection.policy import SelectionPolicy, Summary

POLICIES = Registry(
    __name__, base=("policy", "SelectionPolicy"), group="vllm_triforce.selection_policies"
)

__all__ = ["POLICIES", "SelectionPolicy", "Summary"]


def __getattr__(name: str) -> Any:
    if name not in ("SelectionPolicy", "Summary"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"{__name__}.policy"), name)
    return globals()[name]
