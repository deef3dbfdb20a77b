"""Results of the pictures: a JSON file for each picture, with a line for each result.

``runs`` holds command, commit, date, processor and versions of each run, and each of ``rows`` names
its run.
"""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
NAMES = ("front", "head", "batch", "acceptance")


def path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def read(name: str) -> dict:
    return json.loads(path(name).read_text())


def write(name: str, results: dict) -> None:
    """Write a line for each row, so that a difference shows the changed results alone."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in results["rows"])
    head = json.dumps(results | {"rows": []}, indent=1).removesuffix("[]\n}")
    path(name).write_text(f"{head}[\n{rows}\n ]\n}}\n")


def fingerprint(results: dict) -> str:
    """Hash the values; line ends and order of keys do not count."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]
