"""Wrap methods of vLLM in place; the ledger (patches/README.md) is generated from the patches."""

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

    Args:
        module, owner, attribute: the attribute to wrap; the class must define it itself.
        wrap: takes the original function (of a property: its getter) and returns the wrapper.
        parameters: names of the original's parameters, in order; None if the wrapper passes on any.
        why: reason, for the ledger.
        until: condition under which the patch can be deleted, for the ledger.
    """

    module: str
    owner: str
    attribute: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    parameters: tuple[str, ...] | None
    why: str
    until: str

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.attribute}"

    def missing_name(self) -> str | None:
        """Name the patch if this vLLM lacks the attribute; None otherwise.

        Raises:
            ImportError: the module does not exist.
        """
        original = self._original()
        if original is None or not callable(_function(original)):
            return self.name
        return None

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
        """Wrap the original, unless this vLLM lacks it or it is already wrapped.

        Returns:
            True if this call wrapped it.
        """
        owner, original = self._owner(), self._original()
        # A mark on the function would not do: another plugin may have wrapped ours since.
        applied = vars(owner).get(_APPLIED, frozenset()) if owner is not None else frozenset()
        if original is None or self.attribute in applied:
            return False
        function = _function(original)
        wrapped = functools.wraps(function)(self.wrap(function))
        setattr(owner, self.attribute, _like(original, wrapped))
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


def _like(original: Any, wrapped: Callable[..., Any]) -> Any:
    """Return ``wrapped`` as the same kind of attribute as ``original``."""
    if isinstance(original, (classmethod, staticmethod, property)):
        return type(original)(wrapped)
    return wrapped


PATCHES: list[Patch] = []
"""All patches of the package, in the order of their modules' imports."""


def patch(target: str, parameters: str | None, why: str, until: str):
    """Register a patch, whose ``Patch.wrap`` is the decorated function.

    Args:
        target: ``MODULE:CLASS.ATTRIBUTE``, the attribute to wrap.
        parameters: names of the original's parameters, separated by commas; None for any.
        why, until: texts of the ledger.
    """

    def register(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]):
        module, name = target.split(":")
        owner, attribute = name.split(".")
        names = None if parameters is None else tuple(parameters.split(", "))
        PATCHES.append(Patch(module, owner, attribute, wrap, names, why, until))
        return wrap

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
    for patch in PATCHES:
        if (mismatch := patch.signature_mismatch()) is not None:
            raise ValueError(
                f"vllm-triforce wraps {mismatch}. Install vLLM {', '.join(SUPPORTED_VLLM)}."
            )
    for patch in PATCHES:
        patch.apply()
