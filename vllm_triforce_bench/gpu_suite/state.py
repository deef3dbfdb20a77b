"""What of the suite is done, kept in one JSON so that the next call goes on."""

import json
import os
from pathlib import Path

# A step that was cut off by the end of a call is tried once more, not for ever.
MOST_CUTS = 2
FINAL = ("done", "failed", "timeout", "skipped")


class State:
    """``steps``: name to ``status``, ``seconds``, ``result``, ``log_tail``; ``machine``.

    Args:
        path: written after every change, in one piece.
        earlier: a state from another machine to go on from, where ``path`` is not there yet.
    """

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        self.path = path
        source = path if path.exists() else earlier
        self.data = json.loads(source.read_text()) if source else {"version": 1, "steps": {}}

    def is_final(self, name: str) -> bool:
        return self.data["steps"].get(name, {}).get("status") in FINAL

    def record(self, name: str, status: str, seconds: float, **more) -> None:
        before = self.data["steps"].get(name, {})
        cuts = before.get("cuts", 0) + (status == "cut")
        if cuts > MOST_CUTS:
            status = "timeout"
        spent = before.get("seconds", 0.0) * (before.get("status") == "cut") + seconds
        entry = {"status": status, "seconds": round(spent, 1), "cuts": cuts, **more}
        self.data["steps"][name] = entry
        self.save()

    def forget(self, names: list[str]) -> None:
        """So that these steps are run again."""
        for name in names:
            self.data["steps"].pop(name, None)
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(fresh, self.path)
