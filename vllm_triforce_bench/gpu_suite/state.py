"""What of the suite is done, kept in one JSON so that the next call goes on.

A step's status:

    running   begun; found at the start of a call, the call before was killed
    cut       ended before it was done: goes on
    waiting   what it needs is missing, or did not go well: looked at again in every call
    done, failed, timeout, skipped    final, though a step that others wait for is tried again
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

# So often a step may end, or be ended, without having got further. Where the whole call was killed
# it counts so much: that may be the step's doing, but mostly is not.
MOST_CUTS = 2
WEIGHT_OF_A_KILL = 0.5
# So often a step is begun that has failed and that others wait for, the first time included.
MOST_TRIES = 2
FINAL = ("done", "failed", "timeout", "skipped")


class State:
    """``steps``: name to ``status``, ``seconds``, ``result``, ``log_tail``; ``machine``.

    Args:
        path: written after every change, in one piece.
        earlier: a state from another machine to go on from, where ``path`` is not there yet.
        on_change: told of every change.
    """

    def __init__(
        self,
        path: Path,
        earlier: Path | None = None,
        on_change: Callable[[dict], object] = lambda data: None,
    ) -> None:
        self.path = path
        self._on_change = on_change
        source = path if path.exists() else earlier
        self.data = json.loads(source.read_text()) if source else {"version": 2, "steps": {}}

    def of(self, name: str) -> dict:
        """What is known of a step."""
        return self.data["steps"].get(name, {})

    def is_final(self, name: str) -> bool:
        return self.of(name).get("status") in FINAL

    def meets(self, need: str) -> bool:
        """Whether a need is met: "step" if it is done; "step:item" if that item went well, whatever
        became of the others."""
        name, _, item = need.partition(":")
        if not item:
            return self.of(name).get("status") == "done"
        found = ((self.of(name).get("result") or {}).get("items") or {}).get(item)
        return found is not None and "error" not in found

    def begin(self, name: str, progress: str, command: str) -> None:
        """A step begins.

        Args:
            progress: says how far it is; another one when it ends means that it got further.
            command: tries are counted by it.
        """
        before = self.of(name)
        tries = before.get("tries", 0) if before.get("command") == command else 0
        is_new_try = tries == 0 or self.is_final(name)
        self.data["steps"][name] = {
            "status": "running",
            "seconds": before.get("seconds", 0.0),
            "cuts": 0 if is_new_try else before.get("cuts", 0),
            "tries": tries + is_new_try,
            "command": command,
            "progress": progress,
            "result": before.get("result"),
        }
        self.save()

    def note(self, name: str, result: dict | None) -> None:
        """What a running step has found so far."""
        self.data["steps"][name]["result"] = result
        self.save()

    def end(self, name: str, status: str, seconds: float, progress: str, **more) -> None:
        """A step ends.

        Args:
            status: ``done``, ``failed`` and ``skipped`` stand. ``timeout`` (its own), ``cut`` (the
                call is over), ``crashed`` (a signal) and ``killed`` (with its call) go on where it
                got further.
        """
        before = self.of(name)
        cuts = before["cuts"]
        if status in ("timeout", "cut", "crashed", "killed"):
            weight = WEIGHT_OF_A_KILL if status == "killed" else 1
            cuts = 0 if progress != before["progress"] else cuts + weight
            if cuts > MOST_CUTS or (cuts and status == "timeout"):
                status = "timeout" if status in ("timeout", "cut") else "failed"
                more["why"] = "ended again and again without getting further"
            else:
                status = "cut"
        self.data["steps"][name] = {
            **before,
            **more,
            "status": status,
            "seconds": round(before["seconds"] + seconds, 1),
            "cuts": cuts,
            "progress": progress,
        }
        self.save()

    def wait(self, name: str, why: str) -> None:
        """A step cannot begin yet. What it has found stays."""
        self.data["steps"][name] = {"seconds": 0.0, **self.of(name), "status": "waiting"} | {
            "why": why
        }
        self.save()

    def forget(self, names: list[str]) -> None:
        """So that these steps are run again, from their beginning."""
        for name in names:
            self.data["steps"].pop(name, None)
        self.save()

    def save(self) -> None:
        write_json(self.path, self.data)
        self._on_change(self.data)


def write_json(path: Path, data: dict) -> None:
    """In one piece: whoever reads it, or ends us, finds the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(data) + "\n")
    os.replace(fresh, path)


def read_json(path: Path) -> dict | None:
    """None where there is nothing, or nothing whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
