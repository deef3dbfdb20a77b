"""A step's result, item by item: on disk as soon as an item is done, and done once only."""

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_triforce_bench.gpu_suite.state import read_json, write_json

# So often an item may be begun; whoever ends the process each time is an error.
MOST_BEGUN = 2
NO_END = f"the process ended {MOST_BEGUN} times in it"


class Harmless(RuntimeError):
    """An item cannot be done; what it ran on is as it was."""


def start_anew() -> None:
    """Runs this process again from its beginning: after an error of CUDA nothing works in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Items:
    """``{"items": {name: found}, ...}`` in a file. What went wrong has the key ``error``.

    Args:
        path: where an earlier process may have left some.
        limit_s: of an item, and of making an engine; what takes longer is an error.
        start_anew: called after an item's error, unless it is ``Harmless``.
        head: further keys of the result.
    """

    def __init__(
        self,
        path: Path,
        limit_s: float | None = None,
        start_anew: Callable[[], None] = start_anew,
        **head: Any,
    ) -> None:
        self._path = path
        self._limit_s = limit_s
        self._start_anew = start_anew
        self._data: dict = {"items": {}, "begun": {}, **(read_json(path) or {}), **head}
        self._save()

    @property
    def found(self) -> dict[str, dict]:
        return self._data["items"]

    @property
    def num_errors(self) -> int:
        return sum("error" in item for item in self.found.values())

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those that are still to be done."""
        return [name for name in names if name not in self.found]

    def run(self, name: str, work: Callable[[], dict]) -> None:
        """Does an item, if it is missing."""
        if name not in self.found and (found := self._attempt(name, [name], work)) is not None:
            self.put(name, found)

    def run_all(
        self, names: Sequence[str], make: Callable[[], Any], run: Callable[[Any, str], dict]
    ) -> None:
        """Does those items that are missing, ``run(engine, name)``, on one engine, which is made
        only if there are some and let go of afterwards. If it cannot be made, that is the error of
        them all."""
        names = self.missing(names)
        if not names:
            return
        engine = self._attempt(f"engine for {names[0]}", names, make)
        for name in self.missing(names):
            self.run(name, partial(run, engine, name))
        engine = None
        release_memory()

    def put(self, name: str, found: dict) -> None:
        print(f"{name}: {str(found)[:600]}", flush=True)
        self.found[name] = found
        self._data["begun"].pop(name, None)
        self._save()

    def begin(self, what: str) -> None:
        """Puts down that something begins; without an end, it has ended the process."""
        begun = self._data["begun"]
        begun[what] = begun.get(what, 0) + 1
        self._save()

    def has_no_end(self, what: str) -> bool:
        """Whether it has ended the process too often."""
        return self._data["begun"].get(what, 0) >= MOST_BEGUN

    def fail(self, name: str, error: str) -> None:
        self.put(name, {"error": error})

    def _attempt(self, what: str, names: Sequence[str], work: Callable[[], Any]) -> Any:
        """What ``work()`` returns, or None and its error put down for the names."""
        if self.has_no_end(what):
            self._fail(what, names, NO_END)
            return None
        self.begin(what)
        watch = None
        if self._limit_s is not None:
            watch = threading.Timer(self._limit_s, self._overrun, (what, names))
            watch.daemon = True
            watch.start()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            last = traceback.format_exc()[-1500:]
            self._fail(what, names, f"{type(error).__name__}: {str(error)[:500]}\n{last}")
            if not isinstance(error, Harmless):
                self._start_anew()
            return None
        finally:
            if watch is not None:
                watch.cancel()
        del self._data["begun"][what]
        return found

    def _overrun(self, what: str, names: Sequence[str]) -> None:
        """Called beside an item that hangs, on a thread of its own."""
        self._fail(what, names, f"{what} took more than {self._limit_s} s")
        self._start_anew()

    def _fail(self, what: str, names: Sequence[str], error: str) -> None:
        self._data["begun"].pop(what, None)
        for name in names:
            self.fail(name, error)

    def _save(self) -> None:
        write_json(self._path, self._data)


def without_errors(result: dict) -> dict:
    """A result whose errors are to be tried again."""
    kept = {name: item for name, item in result["items"].items() if "error" not in item}
    return {**result, "items": kept}


def after_a_kill(result: dict, weight: float) -> dict:
    """A result whose process was ended with the call: that counts ``weight`` for the items that
    had begun and not ended."""
    begun = {name: count - 1 + weight for name, count in result["begun"].items()}
    return {**result, "begun": begun}


def release_memory() -> None:
    """An engine that nobody holds any more gives its memory back."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
