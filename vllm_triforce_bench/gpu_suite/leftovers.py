"""What a call that was killed has left running: it would hold the GPU, and write results."""

import contextlib
import os
import signal
import time
from pathlib import Path

_NAME = "TRIFORCE_SUITE_WORK"


def marked(work: Path) -> dict[str, str]:
    """For the environment of every step, and so of whatever it starts."""
    return {_NAME: str(work.resolve())}


def end_leftovers(work: Path, patience_s: float = 20) -> None:
    """Ends the processes of steps that this call has not begun.

    Raises:
        RuntimeError: some do not end; the GPU would be shared with them.
    """
    end = time.monotonic() + patience_s
    while found := _find(work):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise RuntimeError(f"processes {found} of an earlier call do not end; end them")
        time.sleep(0.05)


def _find(work: Path) -> list[int]:
    """Processes whose environment has the mark; one that is ending has none any more."""
    ((name, value),) = marked(work).items()
    mark = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environment and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found
