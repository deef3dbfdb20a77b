"""The table of vLLM surfaces against a vLLM's source, or against the facts kept of a release.

Adding an entry is one line in a ``table_*.py``; then, for the release that is not installed,
``python tools/vllm_facts.py 0.33.0``. What we import is read from our own source.
"""

import ast
import importlib.util
import json
from pathlib import Path

from tests.contract import source, table_attention, table_bench, table_config, table_runners

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "vllm_triforce", ROOT / "vllm_triforce_bench" / "bench"]
TABLE = table_config.TABLE + table_runners.TABLE + table_attention.TABLE + table_bench.TABLE


def kept_facts(version: str) -> Path:
    return Path(__file__).parent / f"vllm-{version}.json"


def installed() -> Path:
    """Return the folder of the installed vLLM, without importing it."""
    return Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def imports() -> dict[tuple[str, str], set[str]]:
    """Map (module below vllm, name) to the files of ours that import it."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    key = (".".join(node.module.split(".")[1:]), alias.name)
                    found.setdefault(key, set()).add(str(path.relative_to(ROOT)))
    return found


def users_of_more_than_a_name() -> set[str]:
    """Return our files whose imports from vLLM need an entry in the table."""
    plain = {"logger", "platforms", "triton_utils", "config.compilation"}
    return {
        user for (module, _), users in imports().items() if module not in plain for user in users
    }


def files_needed() -> list[str]:
    """Return the files that the table or the imports may need; not all need exist."""
    files = {surface.file for surface in TABLE}
    for module, name in imports():
        for dotted in (module, f"{module}.{name}".strip(".")):
            files |= set(_candidates(dotted))
    return sorted(files)


def facts_of(root: Path, version: str) -> dict:
    """Collect the facts of a vLLM's source that the table and our imports need."""
    facts: dict = {"version": version, "files": {}, "modules": {}}
    for file in sorted({surface.file for surface in TABLE}):
        text = source.read(root, file)
        facts["files"][file] = None if text is None else _told(file, text)
    for module, name in sorted(imports()):
        names = facts["modules"].setdefault(module, "").split()
        if not names:
            texts = [source.read(root, file) for file in _candidates(module)]
            names = [n for t in texts if t for n in source.file_facts(t)["names"].split()]
        if any((root / file).is_file() for file in _candidates(f"{module}.{name}".strip("."))):
            names.append(name)
        facts["modules"][module] = " ".join(sorted(set(names)))
    return facts


def _candidates(module: str) -> list[str]:
    path = module.replace(".", "/")
    return [f"{path}.py", f"{path}/__init__.py"] if path else ["__init__.py"]


def _told(file: str, text: str) -> dict:
    """Collect the facts of a file that the table needs."""
    everything = source.file_facts(text)
    asked = [surface for surface in TABLE if surface.file == file]
    wanted = {surface.name for surface in asked}
    told: dict = {"functions": {}, "classes": {}, "events": {}}
    for kind in ("functions", "classes"):
        told[kind] = {name: fact for name, fact in everything[kind].items() if name in wanted}
    for surface in asked:
        if surface.needs_events:
            steps = {step for s in asked if s.name == surface.name for step in s.steps}
            found = source.events(text, surface.name)
            told["events"][surface.name] = found and [e for e in found if e in steps]
        elif not surface.name:
            names = {name for s in asked if not s.name for name in s.wanted.split()}
            told["names"] = " ".join(sorted(names & set(everything["names"].split())))
    return told


def complaints(facts: dict) -> list[str]:
    """Describe what moved, one line each: the place, the change, our file that needs it."""
    found = []
    for surface in TABLE:
        told = facts["files"].get(surface.file, {})
        if told is None:
            problem = "the file is gone"
        elif not told or (surface.needs_events and surface.name not in told["events"]):
            problem = _unknown(facts)
        else:
            problem = surface.judge(surface, told)
        if problem:
            found.append(f"{surface.place} {problem} ({surface.user})")
    for (module, name), users in imports().items():
        user = ", ".join(sorted(users))
        if module not in facts["modules"]:
            found.append(f"vllm.{module} {_unknown(facts)} ({user})")
        elif name not in facts["modules"][module].split():
            found.append(f"vllm.{module} no longer offers {name} ({user})")
    return found


def _unknown(facts: dict) -> str:
    version = facts["version"]
    return f"is not in the kept facts: run python tools/vllm_facts.py {version}"


def load(version: str) -> dict:
    return json.loads(kept_facts(version).read_text())
