"""Entry point of vLLM's ``vllm.general_plugins``: wraps vLLM's functions once they are loaded."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any

# Loaded where an engine is configured or run, and nowhere else.
_ENGINE_MODULES = ("vllm.engine.arg_utils", "vllm.v1.engine.core")

DOES_NOT_LOAD = "modules of it do not load here"

_has_warned = False


def register() -> None:
    """Let ``EngineArgs`` understand the method ``triforce``, in processes that load it.

    vLLM calls this in every process, more than once, so it is idempotent and loads nothing: what
    is wrapped is wrapped when vLLM itself loads it.
    """
    for module in _ENGINE_MODULES:
        _after_import.add(module, _install)


class _AfterImport:
    """Finder of modules that runs actions once vLLM has imported the module they wait for."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Callable[[], Any]]] = {}
        self._executed: set[str] = set()
        self._asking = threading.local()

    def is_loaded(self, name: str) -> bool:
        """True if the module has been executed to its end."""
        module = sys.modules.get(name)
        # A module that is still being loaded may not have its classes yet.
        is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
        return name in self._executed or (module is not None and not is_loading)

    def add(self, name: str, action: Callable[[], Any]) -> None:
        """Run ``action`` now if the module is loaded, else right after it is."""
        if self.is_loaded(name):
            action()
            return
        waiting = self._actions.setdefault(name, [])
        if action not in waiting:
            waiting.append(action)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        """Find a module as the other finders do, and follow its execution."""
        # A finder of another package may ask all others too, this one among them.
        asked: set[str] = vars(self._asking).setdefault("names", set())
        if name not in self._actions or name in asked:
            return None
        asked.add(name)
        try:
            spec = _find_elsewhere(self, name, path, target)
        finally:
            asked.remove(name)
        # A loader of the old kind runs modules by another method; such a module is not followed.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._follow(name, spec.loader)
        return spec

    def _follow(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            self._executed.add(name)
            for action in self._actions.pop(name, []):
                action()
            if not self._actions:
                with suppress(ValueError):
                    sys.meta_path.remove(self)

        loader.exec_module = exec_module


def _find_elsewhere(finder, name: str, path, target) -> ModuleSpec | None:
    """Ask the other finders; those of the old kind have no ``find_spec``."""
    for other in list(sys.meta_path):
        if other is finder or not hasattr(other, "find_spec"):
            continue
        if (spec := other.find_spec(name, path, target)) is not None:
            return spec
    return None


_after_import = _AfterImport()


def _install() -> None:
    """Wrap what is loaded, and the rest once it is; leave a vLLM that does not fit as it is.

    It never raises: this runs wherever the package is installed, asked for or not.
    """
    if (reason := why_not(only_loaded=True)) is not None:
        _say_once(reason)
        return
    from vllm_triforce.vllm_patches import PATCHES

    for patch in PATCHES:
        _after_import.add(patch.module, patch.apply)


def why_not(only_loaded: bool = False) -> str | None:
    """Name why this vLLM is left alone; None where it is not.

    All patches of loaded modules are looked for before any is applied.

    Args:
        only_loaded: look at modules that are loaded already, and load no other.
    """
    import vllm

    from vllm_triforce.config.supported import is_supported

    if not is_supported(vllm.__version__):
        return f"its version is {vllm.__version__}"
    try:
        from vllm_triforce.vllm_patches import PATCHES, missing

        found = [p for p in PATCHES if not only_loaded or _after_import.is_loaded(p.module)]
        absent = missing(found)
    except (ImportError, AttributeError) as error:  # a module or a name that moved
        absent = [f"{type(error).__name__}: {error}"]
    except Exception as error:  # vLLM does not work here, with us or without
        return f"{DOES_NOT_LOAD} ({type(error).__name__}: {error})"
    return f"it does not have what would be wrapped: {', '.join(absent)}" if absent else None


def _say_once(reason: str) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    from vllm.logger import init_logger

    from vllm_triforce.config.supported import SUPPORTED_VLLM

    init_logger("vllm.triforce").warning(
        "vllm-triforce leaves this vLLM alone, and method 'triforce' is not available (%s). "
        "Install vLLM %s, or uninstall vllm-triforce.",
        reason,
        ", ".join(SUPPORTED_VLLM),
    )
