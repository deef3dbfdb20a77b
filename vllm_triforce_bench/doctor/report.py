"""The file to attach to a report of a fault: the doctor's results without private names."""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Addresses first: a path would match a part of them.
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\",)\]}]+", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?/[^\s'\":;,)\]}]+")
# Paths and names of the hub among options, in JSON too.
_WITH_SLASH = re.compile(r"[^\s'\"{}\[\]:,=]+/[^\s'\"{}\[\]:,=]+")


def write_report(path: Path, results: dict[str, Any], argv: Iterable[str]) -> None:
    """Write results as JSON without names of models, paths and addresses.

    Args:
        results: the content of ``--json``.
        argv: arguments of the command; what has a slash in them is a name as well.

    Raises:
        OSError: the file cannot be written.
    """
    report = {
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
        # Without their values, which may be keys or paths.
        "variables": sorted(name for name in os.environ if name.startswith("VLLM_")),
        **results,
    }
    names = [*_models(results), *(name for text in argv for name in _WITH_SLASH.findall(text))]
    path.write_text(json.dumps(_without(report, names), indent=1) + "\n")


def _models(results: dict[str, Any]) -> list[str]:
    """Return the names of models in results."""
    engine = results.get("engine", {})
    names = [engine.get("model"), engine.get("draft")]
    names.append(engine.get("settings", {}).get("level2_model"))
    return [*filter(None, names), *(each["model"] for each in results.get("models", ()))]


def _without(value: Any, names: list[str]) -> Any:
    """Replace names of models, paths and addresses in all texts of JSON."""
    hidden = {name: f"<name {i + 1}>" for i, name in enumerate(dict.fromkeys(names))}
    hidden |= {str(folder): "<path>" for folder in (Path.home(), Path.cwd())}
    longest_first = sorted(hidden, key=len, reverse=True)
    name = re.compile("|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in longest_first))

    def clean(text: str) -> str:
        text = name.sub(lambda found: hidden[found[0]], _ADDRESS.sub("<address>", text))
        return _PATH.sub("<path>", text)

    return _map_texts(value, clean)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {name: _map_texts(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(each, change) for each in value]
    return change(value) if isinstance(value, str) else value
