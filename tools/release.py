"""The release checklist: each point is checked, and the packages are built and tried.

    .venv/bin/python tools/release.py                 # all of it; 25 to 40 minutes with the tests
    .venv/bin/python tools/release.py --skip tests    # what was passed just before
    .venv/bin/python tools/release.py --list

Leaves the wheel and the source distribution in ``dist/``. Nothing is uploaded or tagged: the last
lines say which commands do that. Exit code 1 if a point fails; all are tried.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PAIR = ROOT / "examples" / "models"
CHECKS: dict[str, Callable[[], str]] = {}


class Failed(Exception):
    """A point that does not hold; says what to do."""


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Adds a point, in the order of this file; it returns what was found."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """
    Raises:
        Failed: with the end of what the command said.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}:\n{said[-2000:]}")
    return said


def package_version() -> str:
    """The one place where it is written."""
    text = (ROOT / "vllm_triforce" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    if found is None:
        raise Failed("vllm_triforce/__init__.py has no __version__")
    return found[1]


@check
def clean() -> str:
    """All is committed."""
    if left := run("git", "status", "--porcelain").strip():
        raise Failed(f"commit or remove:\n{left}")
    return run("git", "rev-parse", "--short", "HEAD").strip()


@check
def changelog() -> str:
    """Its newest heading is this version, with a date."""
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    wanted = package_version()
    if newest is None or not re.fullmatch(rf"{re.escape(wanted)}, \d{{4}}-\d\d-\d\d", newest[1]):
        found = newest[1] if newest else "none"
        raise Failed(f"CHANGELOG.md begins with {found!r}; give {wanted!r} and the date")
    return newest[1]


@check
def vllm_pin() -> str:
    """The extras ask for the versions that the plugin accepts, and contract tests cover."""
    sys.path.insert(0, str(ROOT))
    from vllm_triforce.config.supported import SUPPORTED_VLLM

    setup = (ROOT / "setup.cfg").read_text()
    wanted = "vllm" + ",".join(SUPPORTED_VLLM)
    if wanted not in setup:
        raise Failed(f"setup.cfg's extra gpu is not {wanted!r}")
    return wanted


@check
def ledger() -> str:
    """``patches/README.md`` says what the code wraps, and lint and types pass."""
    run(sys.executable, "tools/ledger.py", "--check")
    run("make", "lint")
    run("make", "types")
    return "current"


@check
def tests() -> str:
    """``make test-all``, on this tree."""
    return run("make", "test-all").strip().splitlines()[-1]


@check
def build() -> str:
    """Wheel and source distribution; the wheel built from the latter is the same."""
    shutil.rmtree(DIST, ignore_errors=True)
    build_into(DIST)
    check_contents(DIST)
    return ", ".join(sorted(path.name for path in DIST.iterdir()))


@check
def wheel_alone() -> str:
    """The wheel in a new environment beside a stock vLLM, away from this tree."""
    with tempfile.TemporaryDirectory() as folder:
        python = new_environment(Path(folder), next(DIST.glob("*.whl")))
        return smoke(python, Path(folder))


def build_into(folder: Path, *options: str) -> None:
    """Wheel and source distribution, by uv, from a copy of what git has."""
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as copy:
        for name in run("git", "ls-files", "-co", "--exclude-standard").splitlines():
            if (ROOT / name).is_file():
                (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(copy) / name)
        run(uv, "build", "--quiet", "--out-dir", folder, *options, cwd=Path(copy))
    (folder / ".gitignore").unlink(missing_ok=True)


def check_contents(folder: Path) -> None:
    """
    Raises:
        Failed: a module is missing, or something is there that does not belong into a package.
    """
    wheel, source = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    packages = ("vllm_triforce", "vllm_triforce_bench")
    wanted = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if missing := wanted - names:
        raise Failed(f"{wheel.name} lacks {sorted(missing)[:5]}")
    tops = {name.split("/")[0] for name in names} - {f"vllm_triforce-{package_version()}.dist-info"}
    if tops != set(packages):
        raise Failed(f"{wheel.name} has {sorted(tops)}")
    for field in ("Author: the vllm-triforce authors", "License-Expression: Apache-2.0"):
        if field not in metadata:
            raise Failed(f"{wheel.name}'s metadata has no {field!r}")
    if "Project-URL" in metadata or "Home-page" in metadata:
        raise Failed(f"{wheel.name}'s metadata has a URL; the project has none to give")
    with tarfile.open(source) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    if missing := (wanted | {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"}) - inside:
        raise Failed(f"{source.name} lacks {sorted(missing)[:5]}")


def new_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with stock vLLM's CPU build and the wheel, made as tools/install.sh
    makes one.

    Returns:
        Its Python.
    """
    (folder / "project").mkdir()
    for name in ("setup.cfg", "pyproject.toml", "tools", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "project" / name)
    run("bash", "tools/install.sh", sys.executable, str(wheel), cwd=folder / "project")
    return folder / "project" / ".venv" / "bin" / "python"


SMOKE = """
import sys
from importlib.metadata import version

import vllm_triforce
from vllm import LLM, SamplingParams

home, target, draft, text = sys.argv[1:]
assert vllm_triforce.__file__.startswith(home), vllm_triforce.__file__
assert version("vllm-triforce") == vllm_triforce.__version__
prompt = open(text).read()[:4000]
greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answer(**more):
    llm = LLM(target, dtype="float32", max_model_len=4096, kv_cache_memory_bytes=1 << 28,
              enforce_eager=True, disable_log_stats=False, **more)
    out = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    return llm, list(out)


_, stock = answer()
keys = {"method": "triforce", "model": draft, "retrieval_budget": 512, "adaptive": False,
        "min_context": 0}
llm, found = answer(speculative_config=keys)
from vllm_triforce.metrics.report import counters_of, summary

assert found == stock, (found, stock)
counters = counters_of(llm)
print(summary(counters))
assert counters.num_proposals > 0
"""


def smoke(python: Path, home: Path) -> str:
    """An engine of stock vLLM and one of TriForce from an installed wheel; the same tokens.

    Args:
        home: where the package must come from.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    text = ROOT / "examples" / "prompts" / "held_out.txt"
    pair = (PAIR / "target", PAIR / "draft")
    said = run(python, "-c", SMOKE, home, *pair, text, cwd=home, **env)
    return next(line for line in said.splitlines() if line.startswith("TriForce metrics"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--skip", nargs="*", default=[], choices=[*CHECKS], help="points")
    parser.add_argument("--list", action="store_true", help="say what is checked, and stop")
    args = parser.parse_args()
    failed = []
    for name, function in CHECKS.items():
        what = (function.__doc__ or "").strip().splitlines()[0]
        if args.list or name in args.skip:
            print(f"{'skipped' if not args.list else '':8}{name}: {what}")
            continue
        try:
            print(f"ok      {name}: {function()}", flush=True)
        except Failed as error:
            failed.append(name)
            print(f"FAILED  {name}: {error}", flush=True)
    if not failed and not args.list:
        version = package_version()
        print(f"\nNext: git tag v{version}; twine upload dist/*{version}*")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
