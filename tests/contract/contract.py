"""What we lean on in vLLM, found in our own source, and what of it moved between two releases.

A surface is a class, function or constant of vLLM: what we import by name, and ``table.REACHED``.
Of a class we lean on the members whose names occur in our source, of a method that we override or
replace on its exact signature, of what we call on a signature that takes all calls of before.
"""

import ast
import functools
import importlib.util
import json
import re
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from tests.contract import source
from tests.contract.table import ACTIONS, MAY_GROW, REACHED

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "vllm_triforce", ROOT / "vllm_triforce_bench" / "bench"]

# Names for getattr(), and "Owner.method" of what is wrapped or swapped.
_NAMED = re.compile(r"([\w. :()]+[.])?(\w+)")


def kept_facts(version: str) -> Path:
    return Path(__file__).parent / f"vllm-{version}.json"


def load(version: str) -> dict:
    return json.loads(kept_facts(version).read_text())


def installed() -> Path:
    """Return the folder of the installed vLLM, without importing it."""
    return Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


@functools.cache
def our_files() -> dict[Path, ast.Module]:
    paths = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in paths}


def imports() -> set[tuple[str, str]]:
    """Return (module below vllm, name) of all that our files import by name."""
    return {
        (".".join(node.module.split(".")[1:]), alias.name)
        for tree in our_files().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


@functools.cache
def our_names() -> tuple[set[str], set[str], set[str]]:
    """Return names of attributes, of methods that vLLM calls, and of classes that we construct."""
    used, exact, constructed = set(), set(), set()
    for path, tree in our_files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                used.add(node.arg)
            elif isinstance(node, ast.Call):
                constructed.add(ast.unparse(node.func))
            elif isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                exact |= {method.name for method in methods if not method.args.vararg}
                used |= {method.name for method in methods}
                if "__init__" in {method.name for method in methods}:
                    constructed |= {ast.unparse(base) for base in node.bases}
                assigned = [part for part in node.body if isinstance(part, ast.Assign)]
                used |= {ast.unparse(target) for part in assigned for target in part.targets}
            elif isinstance(node, ast.Constant) and (found := _NAMED.fullmatch(str(node.value))):
                used.add(found[2])
                if found[1] and path.parent.name == "vllm_patches":
                    exact.add(found[2])
    return used | exact, exact, constructed


@functools.cache
def surfaces() -> dict[str, set[str]]:
    """Map files of vLLM to the classes, functions and other names there that we lean on."""
    found = {file: set(names.split()) for file, names in REACHED.items()}
    for module, name in imports():
        if submodule := _module_file(f"{module}.{name}".strip(".")):
            found.setdefault(submodule, set())
        else:
            for file in filter(None, (_module_file(module), _file_of(module, name))):
                found.setdefault(file, set()).add(name)
    for file, name, _ in ACTIONS:
        found.setdefault(file, set()).add(name.split(".")[0])
    return dict(sorted(found.items()))


def _module_file(module: str) -> str | None:
    path = module.replace(".", "/")
    files = [f"{path}.py", f"{path}/__init__.py"] if path else ["__init__.py"]
    return next((file for file in files if (installed() / file).is_file()), None)


def _file_of(module: str, name: str) -> str | None:
    """Return the file that defines a name, though another module offers it."""
    file = _module_file(module)
    for node in source.blocks(ast.parse(source.read(installed(), file)).body) if file else ():
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            above = module.split(".") if file.endswith("__init__.py") else module.split(".")[:-1]
            above = above[: len(above) + 1 - node.level] if node.level else []
            there = ".".join([*above, *(node.module or "").split(".")]).removeprefix("vllm.")
            return _file_of(there, name)
    return file


def files_needed() -> list[str]:
    """Return the files whose facts are kept; not all need exist."""
    return sorted(file for name in surfaces() for file in source.places(name))


def facts_of(root: Path, version: str) -> dict:
    """Collect the facts of a vLLM's source about the surfaces."""
    facts: dict = {"version": version, "files": {}}
    for file, names in surfaces().items():
        text = source.read(root, file)
        facts["files"][file] = None if text is None else _told(file, text, names)
    return facts


def _told(file: str, text: str, names: set[str]) -> dict:
    everything = source.file_facts(text)
    told: dict = {
        kind: {name: its for name, its in everything[kind].items() if name.split(".")[0] in names}
        for kind in ("functions", "classes")
    }
    told["asked"] = " ".join(sorted(names))
    told["names"] = " ".join(sorted(names & set(everything["names"].split())))
    told["events"] = {}
    for _, name, _ in (action for action in ACTIONS if action[0] == file):
        wanted = {step for f, n, steps in ACTIONS if (f, n) == (file, name) for step in steps}
        found = source.events(text, name)
        told["events"][name] = found and [event for event in found if event in wanted]
    return told


def complaints(facts: dict) -> list[str]:
    """Describe what moved between the installed vLLM and another, one line each: the place, the
    change, our files that have the name."""
    both = [facts_of(installed(), metadata.version("vllm")), facts]
    old, new = sorted(both, key=lambda each: Version(each["version"]))
    found = []
    for file, names in surfaces().items():
        its, then = new["files"].get(file, {}), old["files"].get(file, {})
        if its is None or then is None:
            found.append(f"vllm/{file}: the file is gone{_users(*names)}")
        elif not all(names <= set(each.get("asked", "").split()) for each in (its, then)):
            run = f"run python tools/vllm_facts.py {facts['version']}"
            found.append(f"vllm/{file} is not in the kept facts: {run}")
        else:
            moved = {**_lost(names, then, its, new), **_changed(then, its)}
            found += [f"vllm/{file}: {name} {how}{_users(name)}" for name, how in moved.items()]
    for each in both:
        found += _skipped(each)
    return found


def _users(*names: str) -> str:
    """List our files that have the last part of one of the names."""
    last = [name.removesuffix(".__init__").split(".")[-1] for name in names]
    words = re.compile(rf"\b({'|'.join(last)})\b")
    users = [str(p.relative_to(ROOT)) for p in our_files() if words.search(p.read_text())]
    return f" ({', '.join(users)})"


def _lost(names: set[str], old: dict, new: dict, facts: dict) -> dict[str, str]:
    """Return what is gone of classes, their bases and members, and of other names."""
    used, *_ = our_names()
    lost = dict.fromkeys(names - set(new["names"].split()), "is gone")
    for name in names & old["classes"].keys() & new["classes"].keys():
        before, after = old["classes"][name], new["classes"][name]
        members, bases = set(after["members"].split()), after["bases"]
        for file in filter(None, facts["files"].values()):
            inherited = [its["members"] for n, its in file["classes"].items() if n in bases]
            members |= set(" ".join(inherited).split())
        for member in (set(before["members"].split()) & used) - members:
            lost[f"{name}.{member}"] = "is gone"
        if set(before["bases"]) - set(bases):
            lost[name] = f"derives from {bases}, not {before['bases']}"
    return lost


def _changed(old: dict, new: dict) -> dict[str, str]:
    """Return functions that no longer take what they took."""
    used, exact, constructed = our_names()
    changed = {}
    for name, before in old["functions"].items():
        owner, _, method = name.rpartition(".")
        is_used = owner in constructed if method == "__init__" else not owner or method in used
        after = new["functions"].get(name)
        if not is_used or after in (None, before):
            continue
        is_exact = method in exact - MAY_GROW and method != "__init__"
        if is_exact or not source.takes_all_calls(after, before):
            changed[name] = f"takes ({after}), not ({before})"
    return changed


def _skipped(facts: dict) -> list[str]:
    """Describe actions that a function no longer does, or in another order."""
    found = []
    for file, name, steps in ACTIONS:
        left, done = (facts["files"][file] or {"events": {}})["events"].get(name) or [], ""
        for step in steps:
            if step not in left:
                problem = f"no longer does {step!r}{done} in {facts['version']}"
                found.append(f"vllm/{file}: {name} {problem}")
                break
            left, done = left[left.index(step) + 1 :], f" after {step!r}"
    return found
