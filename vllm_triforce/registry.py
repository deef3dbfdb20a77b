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
        group: entry point group.
    """

    def __init__(self, package: str, base: tuple[str, str], group: str) -> None:
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
        for entry in entry_points(group=self._group):
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
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _load(self, name: str) -> type:
        """Load the class of a module of the package, or of an entry point.

        Raises:
            ValueError: it does not load, is no such class, or leaves abstract methods open.
        """
        base_module, base_name = self._base
        base = getattr(importlib.import_module(f"{self._package}.{base_module}"), base_name)
        if (entry := self._added.get(name)) is None:
            module = importlib.import_module(f"{self._package}.{name}")
            where, values = str(module.__file__), list(vars(module).values())
        else:
            where = f"{entry.value} of {_project(entry)}"
            try:
                values = [entry.load()]
            except Exception as error:  # the other package's code may raise anything
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{where} does not load ({reason}). Correct or uninstall it"
                ) from error
        for value in values:
            is_subclass = isinstance(value, type) and issubclass(value, base)
            if not is_subclass or vars(value).get("name") != name:
                continue
            if inspect.isabstract(value):
                lacking = sorted(getattr(value, "__abstractmethods__", ()))
                raise ValueError(f"{where}: {value.__name__} lacks {lacking}")
            return value
        verb, source = ("has", "file") if entry is None else ("is", "entry point")
        raise ValueError(
            f"{where} {verb} no class over {base_name} with name = {name!r}. Give the class the "
            f"name of its {source}"
        )


def _project(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
