"""The file to attach to a report of a fault: the doctor's results without private names.

Fields that hold a model's name are replaced as a whole. Other texts, such as refusals, quote
the user: there everything given on the command line is replaced, and all that looks like a path, an
address or a key. This is a best effort: vLLM's errors may quote other things.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.level2 import DTYPES

_PRIVATE = (
    # Addresses, mail, IP addresses, hosts.
    re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\")}]+", re.IGNORECASE),
    re.compile(r"\S+@\S+\.\w+"),
    re.compile(r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\b\]?(?::\d+)?|\[[0-9a-f:]*:[0-9a-f:]*\](?::\d+)?"),
    re.compile(r"(?<=host=)'[^']*'"),
    # Modules of a model's own code, and tokens of the hub.
    re.compile(r"transformers_modules\.[\w.-]+"),
    re.compile(r"\bhf_\w{8,}"),
    # Paths, which may have spaces; then relative paths and names of the hub.
    re.compile(r"(?<![\w.])(?:~|\.{1,2})?/[^'\":;)\]}\n]*[^'\":;)\]}\s.]"),
    re.compile(r"(?<![\w<])(?!tokens/s\b)[\w.~-]+(?:/[\w.@~-]+)+/?"),
)
# Words of options and keys, which say nothing of a user.
_WORDS = {*(field.name for field in fields(TriForceConfig)), *DTYPES, "suffix"}
_WORDS |= {"triforce", "auto", "fp8", "doctor", "retrieval", "quest", "streaming", "prompt_lookup"}


def write_report(path: Path, results: dict[str, Any], argv: Iterable[str]) -> None:
    """Write the content of ``--json`` without names of models, paths and addresses.

    Raises:
        OSError: the file cannot be written.
    """
    machine = {"system": platform.system(), "processor": platform.machine()}
    results, models = _without_models(results)
    hidden = {name for text in argv for name in _given(text)} | models
    # Of variables the names alone: a value may be a key.
    variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    hidden |= {value for value in variables.values() if not value.isdecimal() and len(value) > 2}
    report = {
        "machine": {**machine, "cores": os.cpu_count()},
        "variables": sorted(variables),
        **_map_texts(results, _hider(hidden - _WORDS)),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _without_models(results: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Replace the fields that hold a model's name; returns these names, too."""
    results = json.loads(json.dumps(results))
    # A command line has names without quotes around them; its keys stand beside it.
    results.get("prediction", {}).get("choice", {}).pop("command", None)
    engine = results.get("engine", {})
    holders = [(engine, "model", "model"), (engine, "draft", "draft")]
    holders.append((engine.get("settings", {}), "level2_model", "level2_model"))
    for number, each in enumerate(results.get("models", ()), 1):
        holders.append((each, "model", f"model {number}"))
    names = set()
    for holder, field, kind in holders:
        if holder.get(field) not in (None, "fp8", *DTYPES):
            names.add(holder[field])
            holder[field] = f"<{kind}>"
    return results, names


def _given(text: str) -> Iterator[str]:
    """Yield the values in an argument, each in several spellings; in JSON, all texts but keys."""
    value = text.partition("=")[2] if text.startswith("--") else text
    values: list[str] = []
    try:
        _map_texts(json.loads(value), values.append)
    except ValueError:
        values.append(value)
    for each in values:
        yield from {each, each.rstrip("/"), os.path.normpath(each), os.path.basename(each)}


def _hider(names: set[str]) -> Callable[[str], str]:
    """Return a function that replaces names and private parts of a text."""
    # A word of the language is hidden where it is quoted alone: a folder may be named "target".
    patterns = [
        rf"(?<!\w){re.escape(name)}(?!\w)"
        if re.search(r"[^A-Za-z]", name)
        else rf"(?<=['\"]){re.escape(name)}(?=['\"])"
        for name in sorted(names, key=len, reverse=True)
        if len(name) > 1 and not name.startswith("-")
    ]
    given = re.compile("|".join(patterns) or r"(?!)")

    def hide(text: str) -> str:
        text = given.sub("<given>", text)
        for pattern in _PRIVATE:
            text = pattern.sub("<private>", text)
        return text

    return hide


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Change all texts of JSON but keys and those that are the same for everybody."""
    if isinstance(value, dict):
        return {
            name: each if name == "wraps" else _map_texts(each, change)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_map_texts(each, change) for each in value]
    return change(value) if isinstance(value, str) else value
