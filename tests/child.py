"""Processes of their own: commands, and modules of the tests that say what they saw as JSON."""

import json
import subprocess
import sys

from tests.models import ROOT

_MARKER = "RESULTS "


def run(*command, code: int = 0, **more) -> subprocess.CompletedProcess:
    """Run a command in the project's folder; fail with what it said if its status is another.

    Args:
        more: of ``subprocess.run()``.
    """
    command = [str(part) for part in command]
    more = {"cwd": ROOT, "capture_output": True, "text": True, **more}
    done = subprocess.run(command, **more)
    assert done.returncode == code, done.stdout[-20000:] + done.stderr[-5000:]
    return done


def say(results) -> None:
    """Tell the parent, in the child."""
    print(_MARKER + json.dumps(results), flush=True)


def results_of(module: str, *arguments: str, **more):
    """Run a module as ``run()`` does; return what it says by ``say()``."""
    done = run(sys.executable, "-m", module, *arguments, **{"timeout": 1200, **more})
    said = [line for line in done.stdout.splitlines() if line.startswith(_MARKER)]
    return json.loads(said[-1].removeprefix(_MARKER))
