"""Classes that are found by the names of their files: adding one is adding a file."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any


class Registry(Mapping[str, Any]):
    """The classes of a package's modules, each named as its module.

    The names are known from the files alone, so that what a user asks for is checked without
    loading anything; a class is loaded when it is asked for.

    Args:
        package: its dotted name.
        base: the module in it that defines what they all are, and the name of that class.
        shared: further modules in it that define none.
    """

    def __init__(self, package: str, base: tuple[str, str], shared: Collection[str] = ()) -> None:
        self._package = package
        self._base = base
        self._shared = {base[0], *shared}
        self._loaded: dict[str, type] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        spec = importlib.util.find_spec(self._package)
        if spec is None:
            raise ModuleNotFoundError(f"{self._package} is missing: install vllm-triforce anew")
        modules = pkgutil.iter_modules(spec.submodule_search_locations)
        return tuple(sorted(m.name for m in modules if m.name not in self._shared))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _load(self, name: str) -> type:
        """
        Raises:
            ValueError: the module defines no such class of its own name.
        """
        base = getattr(importlib.import_module(f"{self._package}.{self._base[0]}"), self._base[1])
        module = importlib.import_module(f"{self._package}.{name}")
        for found in vars(module).values():
            is_one = isinstance(found, type) and issubclass(found, base)
            if is_one and vars(found).get("name") == name:
                if inspect.isabstract(found):
                    lacks = sorted(found.__abstractmethods__)
                    raise ValueError(f"{module.__file__}: {found.__name__} lacks {lacks}")
                return found
        raise ValueError(
            f"{module.__file__} has no class over {self._base[1]} with name = {name!r}; name the "
            "class's name as its file"
        )
