"""A module of the tests in a process of its own, which says what it saw as JSON."""

import json
import subprocess
import sys
from pathlib import Path

from tests.models import ROOT

_MARKER = "RESULTS "


def say(results) -> None:
    """Tell the parent, in the child."""
    print(_MARKER + json.dumps(results), flush=True)


def results_of(module: str, *arguments: str, cwd: Path = ROOT, timeout: float = 1200, **more):
    """Run a module; return what it says by ``say()``.

    Args:
        more: of ``subprocess.run()``.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        **more,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(_MARKER)]
    assert said, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(said[-1].removeprefix(_MARKER))
