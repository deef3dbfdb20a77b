"""Promise: the way of data is visible; imports go one way, and the lowest layers know no vLLM."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
import vllm

from tests.models import ROOT

PACKAGE = ROOT / "vllm_triforce"
# From the bottom up; a module may import its own layer and those before it.
DRAWING = (ROOT / "docs" / "architecture.md").read_text().split("## The house")[1].split("```")[1]
DRAWING = DRAWING.split("\n", 1)[1]  # behind the fence's language
LAYERS = [re.split(r",\s*", re.split(r"\s{2,}", line)[0]) for line in DRAWING.split("\n") if line][
    ::-1
]
# What measures the package, beside it; none needs another, but all may use what is shared.
BENCHMARKS = ROOT / "vllm_triforce_bench"
TOOLS = ["bench", "lab", "predict", "doctor"]
SHARED = ["colours", "console", "page", "predict", "preload"]
WITHOUT_VLLM = [
    "vllm_triforce/cache/*.py",
    "vllm_triforce/controller/*.py",
    "vllm_triforce/selection/*.py",
    "vllm_triforce/config/keys.py",
    "vllm_triforce/config/triforce_config.py",
    "vllm_triforce_bench/lab/*.py",
]


def imports(path) -> set[str]:
    """Return the modules imported anywhere in a file."""
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
        file = PACKAGE / f"{folder}.py"
        files = [file] if file.is_file() else list((PACKAGE / folder).rglob("*.py"))
        assert files
        for path in files:
            for module in imports(path):
                parts = module.split(".")
                if parts[0] == "vllm_triforce" and len(parts) > 1:
                    assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {module}"


# Files, and beginnings of modules that they do not import.
FORBIDDEN = [
    *((place, ["vllm"]) for place in WITHOUT_VLLM),
    ("vllm_triforce/runner_v1/**/*.py", ["vllm_triforce.runner_v2"]),
    ("vllm_triforce/runner_v2/**/*.py", ["vllm_triforce.runner_v1"]),
    ("vllm_triforce/attention/cpu.py", ["vllm_triforce.attention.gpu"]),
    ("vllm_triforce/attention/gpu/**/*.py", ["vllm_triforce.attention.cpu"]),
    ("vllm_triforce/**/*.py", ["vllm_triforce_bench"]),
    ("vllm_triforce*/**/*.py", ["tests", "benchmarks", "tools", "examples"]),
    *(
        (
            f"vllm_triforce_bench/{tool}/**/*.py",
            [f"vllm_triforce_bench.{o}" for o in TOOLS if o not in (tool, *SHARED)],
        )
        for tool in TOOLS
    ),
]


@pytest.mark.parametrize("pattern, modules", FORBIDDEN, ids=lambda value: str(value)[:60])
def test_nothing_forbidden_is_imported(pattern, modules):
    paths = list(ROOT.glob(pattern))
    assert paths
    for path in paths:
        for name in imports(path):
            assert not any(name == m or name.startswith(f"{m}.") for m in modules), (path, name)


def test_every_folder_is_in_a_layer():
    tools = {path.parent.name for path in BENCHMARKS.glob("*/__init__.py")}
    assert tools == set(TOOLS)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    drawn = {name for names in LAYERS for name in names}
    assert folders == {name for name in drawn if not (PACKAGE / f"{name}.py").is_file()}


def test_no_file_is_long():
    long = {
        str(path.relative_to(ROOT)): count
        for path in PACKAGE.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 450
    }
    assert not long, long


_PATH = re.compile(r"(?<![\w./<-])((?:[\w.]+/)*\w+\.(?:py|md))\b")


@pytest.mark.parametrize("folder", [PACKAGE, BENCHMARKS], ids=lambda folder: folder.name)
def test_files_named_in_docstrings_and_comments_exist(folder):
    """Paths are relative to the root, the package, the file's folder, or vLLM."""
    installed = Path(vllm.__file__).parent
    missing = []
    for path in folder.rglob("*.py"):
        source = path.read_text()
        texts = [
            node.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        ]
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
        roots = (ROOT, folder, PACKAGE, path.parent, ROOT / "docs", installed.parent, installed)
        for name in {name for text in texts for name in _PATH.findall(text)}:
            if not any((root / name).exists() for root in roots):
                missing.append(f"{path.relative_to(ROOT)} names {name}")
    assert not missing, missing
