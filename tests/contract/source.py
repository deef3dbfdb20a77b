"""What a vLLM source file declares, read by ``ast``: nothing of vLLM is imported.

The facts are plain lists, dicts and strings, so those of a release that is not installed can be
kept as JSON.
"""

import ast
from collections.abc import Iterator
from pathlib import Path


def file_facts(source: str) -> dict:
    """Collect names, signatures and members of one module.

    Returns:
        ``names``: everything that can be imported from it;
        ``functions``: qualified name to signature, as ``signature`` writes it;
        ``classes``: qualified name to ``bases`` and ``members`` (methods, class attributes, and
        what its own methods assign to ``self``).
    """
    tree = ast.parse(source)
    facts: dict = {"names": " ".join(sorted(_names(tree.body))), "functions": {}, "classes": {}}
    _collect(tree.body, "", facts)
    return facts


def events(source: str, function: str) -> list[str] | None:
    """List the actions of a function in the order of the source, None without such a function."""
    node = next((n for name, n in _functions(ast.parse(source).body) if name == function), None)
    if node is None:
        return None
    found = []
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            found.append((part, _dotted(part.func) + "("))
            if _dotted(part.func) == "isinstance" and len(part.args) == 2:
                subject = _dotted(part.args[0])
                found += [(part, f"isinstance({subject}, {c})") for c in _classes(part.args[1])]
        elif isinstance(part, ast.Assign):
            found += [(part, _dotted(target) + " =") for target in part.targets]
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            found.append((part, _dotted(part.target) + " ="))
    found.sort(key=lambda item: (item[0].lineno, item[0].col_offset))
    return [text for _, text in found]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Write a signature as ``self, a, b=, *, c=, **kwargs``: names and defaults, no types."""
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    without = len(positional) - len(a.defaults)
    parts = [p.arg + ("=" if i >= without else "") for i, p in enumerate(positional)]
    if a.vararg:
        parts.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        parts.append("*")
    parts += [p.arg + ("" if d is None else "=") for p, d in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg:
        parts.append("**" + a.kwarg.arg)
    return ", ".join(parts)


def takes_all_calls(new: str, old: str) -> bool:
    """True if a signature takes every call that another one takes."""
    (positional, required, names), before = _parameters(new), _parameters(old)
    is_known = before[2] <= names or "**" in new
    return positional[: len(before[0])] == before[0] and required <= before[1] and is_known


def _parameters(signature: str) -> tuple[list[str], set[str], set[str]]:
    """Return the parameters that may be given by place, that must be given, and all."""
    parts = [part for part in signature.split(", ") if part and not part.startswith("**")]
    stars = [place for place, part in enumerate(parts) if part.startswith("*")]
    by_place = parts[: stars[0]] if stars else parts
    parts = [part for part in parts if not part.startswith("*")]
    required = {part for part in parts if not part.endswith("=")}
    return [part.rstrip("=") for part in by_place], required, {part.rstrip("=") for part in parts}


def places(file: str) -> list[str]:
    """Return the files in which a module may be: its own, or that of a package."""
    module = file.removesuffix(".py").removesuffix("/__init__")
    return list(dict.fromkeys((file, f"{module}.py", f"{module}/__init__.py")))


def read(root: Path, file: str) -> str | None:
    """Read a module below the folder ``vllm``; None if it is gone."""
    there = [root / place for place in places(file) if (root / place).is_file()]
    return there[0].read_text() if there else None


def blocks(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also inside if, try and with."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from blocks(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from blocks(handler.body)


def _names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in blocks(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return names


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in blocks(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _collect(body: list[ast.stmt], prefix: str, facts: dict) -> None:
    for name, node in _functions(body, prefix):
        facts["functions"].setdefault(name, signature(node))
    for node in blocks(body):
        if isinstance(node, ast.ClassDef):
            members = _names(node.body)
            for _, method in _functions(node.body):
                members |= {
                    part.attr
                    for part in ast.walk(method)
                    if isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and _dotted(part.value) == "self"
                }
            facts["classes"][node.name] = {
                "bases": [_dotted(base).split("[")[0] for base in node.bases],
                "members": " ".join(sorted(members)),
            }


def _dotted(node: ast.AST) -> str:
    return ast.unparse(node)


def _classes(node: ast.AST) -> list[str]:
    if isinstance(node, ast.BinOp):
        return _classes(node.left) + _classes(node.right)
    if isinstance(node, ast.Tuple):
        return [name for element in node.elts for name in _classes(element)]
    return [_dotted(node)]
