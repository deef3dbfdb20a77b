"""Wrap methods of vLLM in place; the ledger (patches/README.md) lists the patches."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_triforce.config.keys import SUPPORTED_VLLM

# Attribute of a patched class: names of its wrapped attributes.
_APPLIED = "_triforce_patches"


@dataclass(frozen=True)
class Patch:
    """Wrapper around a method or property of vLLM.

    The wrapper calls the original unless the engine runs TriForce.
    """

    module: str
    owner: str
    attribute: str  # to wrap; the class must define it itself
    function: Callable[..., Any]
    """Replaces the attribute; its first argument is the original function, or property's getter."""
    parameters: tuple[str, ...] | None  # of the original, by name; None if any are passed on
    why: str  # for the ledger
    until: str  # condition under which the patch can be deleted, for the ledger

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.attribute}"

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return self.function(original, *args, **kwargs)

        return wrapper

    def missing_name(self) -> str | None:
        """Name the patch if this vLLM lacks the attribute; None otherwise.

        Raises:
            ImportError: the module does not exist.
        """
        original = self._original()
        return None if original is not None and callable(_function(original)) else self.name

    def signature_mismatch(self) -> str | None:
        """Compare the original's parameters with the expected ones; None if they are equal."""
        original = self._original()
        if self.parameters is None or original is None:
            return None
        actual = tuple(inspect.signature(_function(original)).parameters)
        if actual == self.parameters:
            return None
        return f"{self.name}({', '.join(self.parameters)}), but this vLLM has ({', '.join(actual)})"

    def apply(self) -> bool:
        """Wrap the original, unless this vLLM lacks it or it is wrapped; True if this call did."""
        original = self._original()
        if original is None:
            return False
        # A mark on the function would not do: another plugin may have wrapped ours since.
        owner = self._owner()
        applied = vars(owner).get(_APPLIED, frozenset())
        if self.attribute in applied:
            return False
        wrapped: Any = self.wrap(_function(original))
        if isinstance(original, (classmethod, staticmethod, property)):
            wrapped = type(original)(wrapped)
        setattr(owner, self.attribute, wrapped)
        setattr(owner, _APPLIED, applied | {self.attribute})
        return True

    def _owner(self) -> Any:
        return getattr(importlib.import_module(self.module), self.owner, None)

    def _original(self) -> Any:
        """Return the attribute from the class itself: an inherited one may be abstract."""
        return vars(owner).get(self.attribute) if (owner := self._owner()) is not None else None


def _function(original: Any) -> Any:
    """Return the plain function of a method or property."""
    if isinstance(original, property):
        return original.fget
    return getattr(original, "__func__", original)


PATCHES: list[Patch] = []
"""All patches of the package, in the order of their modules' imports."""


def patch(target: str, parameters: str | None, why: str, until: str):
    """Register the decorated function as the ``function`` of a ``Patch``.

    Args:
        target: ``MODULE:CLASS.ATTRIBUTE``, the attribute to wrap.
        parameters: names separated by commas; None for any.
    """

    def register(function: Callable[..., Any]):
        module, name = target.split(":")
        owner, attribute = name.split(".")
        names = None if parameters is None else tuple(parameters.split(", "))
        PATCHES.append(Patch(module, owner, attribute, function, names, why, until))
        return function

    return register


def missing(patches: list[Patch]) -> list[str]:
    """Name the patches whose wrapped attribute this vLLM lacks."""
    return [name for patch in patches if (name := patch.missing_name()) is not None]


def install_in_engine() -> None:
    """Apply all patches in a process that configures an engine with TriForce.

    Raises:
        ValueError: this vLLM lacks a wrapped attribute, or its parameters differ.
    """
    try:
        missing_names = missing(PATCHES)
    except ImportError as error:
        missing_names = [str(error)]
    if missing_names:
        raise ValueError(
            f"vllm-triforce wraps {', '.join(missing_names)}, which this vLLM does not have. "
            f"Install vLLM {', '.join(SUPPORTED_VLLM)}, or drop method='triforce'."
        )
    if mismatches := list(filter(None, (patch.signature_mismatch() for patch in PATCHES))):
        raise ValueError(
            f"vllm-triforce wraps {mismatches[0]}. Install vLLM {', '.join(SUPPORTED_VLLM)}."
        )
    for patch in PATCHES:
        patch.apply()
