"""Promise: the way of data is visible; imports go one way, and the lowest layers know no vLLM."""

import ast

import pytest

from tests.models import ROOT

PACKAGE = ROOT / "vllm_triforce"
# From the bottom up; a module may import its own layer and those before it.
LAYERS = [
    ["config"],
    ["selection", "metrics", "controller"],
    ["cache"],
    ["kernels"],
    ["attention", "verification", "patches"],
    ["speculator"],
    ["worker", "scheduler"],
    ["lab"],
    ["bench"],
]
WITHOUT_VLLM = [
    "cache",
    "controller",
    "selection",
    "config/triforce_config.py",
    "verification/oracle.py",
    "lab",
    "lab/policies",
]


def imports(path) -> set[str]:
    """Modules imported anywhere in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_imports_go_one_way(layer):
    allowed = {name for names in LAYERS[: layer + 1] for name in names}
    for folder in LAYERS[layer]:
        files = list((PACKAGE / folder).rglob("*.py"))
        assert files
        for path in files:
            for module in imports(path):
                parts = module.split(".")
                if parts[0] == "vllm_triforce" and len(parts) > 1:
                    assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("place", WITHOUT_VLLM)
def test_lowest_layers_know_no_vllm(place):
    path = PACKAGE / place
    for file in [path] if path.is_file() else path.glob("*.py"):
        assert not any(m == "vllm" or m.startswith("vllm.") for m in imports(file)), file


def test_every_folder_is_in_a_layer():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {name for names in LAYERS for name in names}
