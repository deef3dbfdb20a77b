"""One way to wrap what vLLM has; the ledger (patches/README.md) is made from what is said here."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Attribute of a class: those of its attributes that are wrapped.
_APPLIED = "_triforce_patches"


@dataclass(frozen=True)
class Patch:
    """A method or property of vLLM that is wrapped in place, and falls through to the original
    unless TriForce is asked for.

    Args:
        module, owner, attribute: what is wrapped; the class must have it itself.
        wrap: from the original function (of a property: its getter) to what takes its place.
        parameters: of the original, in their order; None where the wrapper hands on whatever
            there is.
        why: for the ledger, as are ``until`` (when it can go) and where it stands.
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

    def fault(self) -> str | None:
        """Name the patch if this vLLM lacks what it wraps.

        Raises:
            ImportError: there is no such module.
        """
        original = self._original()
        if original is None or not callable(_function(original)):
            return self.name
        return None

    def misfit(self) -> str | None:
        """Say how the original's parameters differ from those that the wrapper knows."""
        original = self._original()
        if self.parameters is None or original is None:
            return None
        found = tuple(inspect.signature(_function(original)).parameters)
        if found == self.parameters:
            return None
        return f"{self.name}({', '.join(self.parameters)}), but this vLLM has ({', '.join(found)})"

    def apply(self) -> bool:
        """Wrap the original, unless this vLLM lacks it or it is wrapped already.

        Returns:
            Whether it was wrapped now.
        """
        owner, original = self._owner(), self._original()
        # Not by a mark on the function: another plugin may have wrapped ours since.
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
        """As it stands in the class; an interface's own would be no implementation."""
        return vars(owner).get(self.attribute) if (owner := self._owner()) is not None else None


def _function(original: Any) -> Any:
    if isinstance(original, property):
        return original.fget
    return getattr(original, "__func__", original)


def _like(original: Any, wrapped: Callable[..., Any]) -> Any:
    """A class method, static method or property stays one."""
    if isinstance(original, (classmethod, staticmethod, property)):
        return type(original)(wrapped)
    return wrapped
