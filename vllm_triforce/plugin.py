"""Entry point of ``vllm.general_plugins``: patches vLLM's modules once they are loaded."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from typing import Any

# Modules that only processes load that configure or run an engine.
_ENGINE_MODULES = ("vllm.engine.arg_utils", "vllm.v1.engine.core")

DOES_NOT_LOAD = "modules of it do not load here"


def register() -> None:
    """Let ``EngineArgs`` accept the method ``triforce``, in processes that load it.

    vLLM calls this in every process, more than once. It is idempotent and loads nothing: a module
    is patched when vLLM loads it.
    """
    for module in _ENGINE_MODULES:
        _after_import.add(module, _install)


class _AfterImport:
    """Module finder that runs actions after a module has been imported."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Callable[[], Any]]] = {}
        self._executed: set[str] = set()
        self._active_lookups = threading.local()

    def is_loaded(self, name: str) -> bool:
        """True if the module has been executed completely."""
        module = sys.modules.get(name)
        # A module that is still loading may lack its classes.
        is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
        return name in self._executed or (module is not None and not is_loading)

    def add(self, name: str, action: Callable[[], Any]) -> None:
        """Run ``action`` now if the module is loaded, otherwise once it is."""
        if self.is_loaded(name):
            action()
            return
        waiting = self._actions.setdefault(name, [])
        if action not in waiting:
            waiting.append(action)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        """Find a module by the other finders, and hook its execution."""
        # Another package's finder may call all finders too, including this one.
        active: set[str] = vars(self._active_lookups).setdefault("names", set())
        if name not in self._actions or name in active:
            return None
        active.add(name)
        try:
            # Finders of the old protocol lack ``find_spec``.
            finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
            specs = (finder.find_spec(name, path, target) for finder in finders)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            active.remove(name)
        # Loaders without ``exec_module`` are of the old protocol; their modules are not hooked.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._hook(name, spec.loader)
        return spec

    def _hook(self, name: str, loader: Any) -> None:
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


_after_import = _AfterImport()


def _install() -> None:
    """Patch loaded modules now and others once loaded; leave an unsupported vLLM alone.

    This never raises: it runs wherever the package is installed, even if TriForce is not used.
    """
    if (reason := unsupported_reason(only_loaded=True)) is not None:
        _warn_once(reason)
        return
    from vllm_triforce.vllm_patches import PATCHES

    for patch in PATCHES:
        _after_import.add(patch.module, patch.apply)


def unsupported_reason(only_loaded: bool = False) -> str | None:
    """Return why this vLLM is left alone; None if it is supported.

    All patches are checked before any is applied, ``only_loaded`` ones without loading modules.
    """
    import vllm

    from vllm_triforce.config.keys import is_supported

    if not is_supported(vllm.__version__):
        return f"its version is {vllm.__version__}"
    try:
        from vllm_triforce.vllm_patches import PATCHES, missing

        patches = [p for p in PATCHES if not only_loaded or _after_import.is_loaded(p.module)]
        missing_names = missing(patches)
    except (ImportError, AttributeError) as error:  # a module or name has moved
        missing_names = [f"{type(error).__name__}: {error}"]
    except Exception as error:  # vLLM itself does not work here
        return f"{DOES_NOT_LOAD} ({type(error).__name__}: {error})"
    if missing_names:
        return f"it does not have what would be wrapped: {', '.join(missing_names)}"
    return None


@cache
def _warn_once(reason: str) -> None:
    from vllm.logger import init_logger

    from vllm_triforce.config.keys import SUPPORTED_VLLM

    init_logger("vllm.triforce").warning(
        "vllm-triforce leaves this vLLM alone, and method 'triforce' is not available (%s). "
        "Install vLLM %s, or uninstall vllm-triforce.",
        reason,
        ", ".join(SUPPORTED_VLLM),
    )
