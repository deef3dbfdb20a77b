"""Classes that are found by the names of their files, or by an entry point: adding one is adding a
file, or installing a package."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Registry(Mapping[str, Any]):
    """The classes of a package's modules, each named as its module, and those that other installed
    packages add by an entry point, ``NAME = MODULE:CLASS``.

    The names are known from files and metadata alone, so that what a user asks for is checked
    without loading anything; a class is loaded when it is asked for.

    Args:
        package: its dotted name.
        base: the module in it that defines what they all are, and the name of that class.
        group: of the entry points; None where no other package may add one.
    """

    def __init__(
        self,
        package: str,
        base: tuple[str, str],
        group: str | None = None,
    ) -> None:
        self._package = package
        self._base = base
        self._group = group
        self._loaded: dict[str, type] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """
        Raises:
            ValueError: an installed package adds a name that is taken.
        """
        return tuple(sorted({*self._files, *self._added}))

    @cached_property
    def _files(self) -> frozenset[str]:
        spec = importlib.util.find_spec(self._package)
        if spec is None:
            raise ModuleNotFoundError(f"{self._package} is missing: install vllm-triforce anew")
        modules = pkgutil.iter_modules(spec.submodule_search_locations)
        return frozenset(m.name for m in modules if m.name != self._base[0])

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self._group) if self._group else ():
            if entry.name in self._files or entry.name in found:
                owner = _project(found[entry.name]) if entry.name in found else "vllm-triforce"
                raise ValueError(
                    f"{_project(entry)} adds {entry.name!r} to {self._group}, and {owner} has one "
                    f"of that name; rename it, or uninstall {_project(entry)}"
                )
            found[entry.name] = entry
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        if name not in self._loaded:
            entry = self._added.get(name)
            self._loaded[name] = self._load(name) if entry is None else self._load_added(entry)
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
        module = importlib.import_module(f"{self._package}.{name}")
        for found in vars(module).values():
            if self._is_one(found, name):
                return _whole(found, str(module.__file__))
        raise ValueError(
            f"{module.__file__} has no class over {self._base[1]} with name = {name!r}; name the "
            "class's name as its file"
        )

    def _load_added(self, entry: EntryPoint) -> type:
        """
        Raises:
            ValueError: the entry point does not load, or names something else.
        """
        where = f"{entry.value} of {_project(entry)}"
        try:
            found = entry.load()
        except Exception as error:  # the other package's code: anything may be wrong with it
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where} does not load ({said}); correct or uninstall it") from error
        if not self._is_one(found, entry.name):
            raise ValueError(
                f"{where} is no class over {self._base[1]} with name = {entry.name!r}; name the "
                "class's name as its entry point"
            )
        return _whole(found, where)

    def _is_one(self, found: object, name: str) -> bool:
        base = getattr(importlib.import_module(f"{self._package}.{self._base[0]}"), self._base[1])
        is_one = isinstance(found, type) and issubclass(found, base)
        return is_one and vars(found).get("name") == name


def _whole(found: type, where: str) -> type:
    """
    Raises:
        ValueError: the class leaves methods of its base open.
    """
    if inspect.isabstract(found):
        lacking = sorted(getattr(found, "__abstractmethods__", ()))
        raise ValueError(f"{where}: {found.__name__} lacks {lacking}")
    return found


def _project(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
