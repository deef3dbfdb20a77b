"""Registry of classes found by file name or by entry point.

To add a class, add a file or install a package.
"""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Registry(Mapping[str, Any]):
    """Mapping of names to the classes of a package's modules and of other installed packages.

    A class is named after its module or entry point, ``NAME = MODULE:CLASS``. Names come
    from files and metadata alone, so configuration is checked without loading a class. A class is
    loaded at its first lookup.

    Args:
        package: dotted name of the package.
        base: module of the package with the base class, and that class's name.
        group: entry point group; None if other packages cannot add classes.
    """

    def __init__(self, package: str, base: tuple[str, str], group: str | None = None) -> None:
        self._package = package
        self._base = base
        self._group = group
        self._loaded: dict[str, type] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sort the names of all classes.

        Raises:
            ValueError: an installed package adds a name that is already taken.
        """
        return tuple(sorted({*self._files, *self._added}))

    @cached_property
    def _files(self) -> frozenset[str]:
        spec = importlib.util.find_spec(self._package)
        if spec is None:
            raise ModuleNotFoundError(f"{self._package} is missing. Reinstall vllm-triforce")
        modules = pkgutil.iter_modules(spec.submodule_search_locations)
        return frozenset(m.name for m in modules if m.name != self._base[0])

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        entries: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self._group) if self._group else ():
            if entry.name in self._files or entry.name in entries:
                owner = _project(entries[entry.name]) if entry.name in entries else "vllm-triforce"
                raise ValueError(
                    f"{_project(entry)} adds {entry.name!r} to {self._group}, and {owner} has one "
                    f"of that name. Rename it, or uninstall {_project(entry)}"
                )
            entries[entry.name] = entry
        return entries

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
        """Load the class of a module of the package.

        Raises:
            ValueError: the module defines no such class with its name.
        """
        module = importlib.import_module(f"{self._package}.{name}")
        for value in vars(module).values():
            if self._is_member(value, name):
                return _checked(value, str(module.__file__))
        raise ValueError(
            f"{module.__file__} has no class over {self._base[1]} with name = {name!r}. Give the "
            "class the name of its file"
        )

    def _load_added(self, entry: EntryPoint) -> type:
        """Load the class of an entry point.

        Raises:
            ValueError: the entry point does not load, or is not such a class.
        """
        where = f"{entry.value} of {_project(entry)}"
        try:
            value = entry.load()
        except Exception as error:  # the other package's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{where} does not load ({reason}). Correct or uninstall it"
            ) from error
        if not self._is_member(value, entry.name):
            raise ValueError(
                f"{where} is no class over {self._base[1]} with name = {entry.name!r}. Give "
                "the class the name of its entry point"
            )
        return _checked(value, where)

    def _is_member(self, value: object, name: str) -> bool:
        """True if the value is a class over the base with this name."""
        base = getattr(importlib.import_module(f"{self._package}.{self._base[0]}"), self._base[1])
        is_subclass = isinstance(value, type) and issubclass(value, base)
        return is_subclass and vars(value).get("name") == name


def _checked(cls: type, where: str) -> type:
    """Return the class if it is concrete.

    Raises:
        ValueError: the class leaves abstract methods open.
    """
    if inspect.isabstract(cls):
        lacking = sorted(getattr(cls, "__abstractmethods__", ()))
        raise ValueError(f"{where}: {cls.__name__} lacks {lacking}")
    return cls


def _project(entry: EntryPoint) -> str:
    """Return the name of the project that adds the entry point."""
    return entry.dist.name if entry.dist is not None else entry.value
