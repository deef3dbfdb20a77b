"""Run the release checklist, and build and try the packages.

    .venv/bin/python tools/release.py                 # all checks; 25 to 40 minutes with the tests
    .venv/bin/python tools/release.py --skip tests    # if they have just passed
    .venv/bin/python tools/release.py --list

Wheel and source distribution are left in ``dist/``. Nothing is uploaded or tagged: the last line
shows the commands for that. All checks run, and the exit code is 1 if any fails.
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
    """A failed check; the message says how to fix it."""


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Register a check, which returns a line for the log; checks run in the order of this file."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a command and return its output.

    Raises:
        Failed: the command failed; the message has the end of its output.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    output = done.stdout + done.stderr
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}:\n{output[-2000:]}")
    return output


def package_version() -> str:
    """Read the version from ``vllm_triforce/__init__.py``, its only place."""
    text = (ROOT / "vllm_triforce" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.M)
    if match is None:
        raise Failed("vllm_triforce/__init__.py has no __version__")
    return match[1]


@check
def clean() -> str:
    """Check that everything is committed."""
    if changes := run("git", "status", "--porcelain").strip():
        raise Failed(f"commit or remove:\n{changes}")
    return run("git", "rev-parse", "--short", "HEAD").strip()


@check
def changelog() -> str:
    """Check that the changelog's newest heading is this version with a date."""
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    version = package_version()
    if newest is None or not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", newest[1]):
        heading = newest[1] if newest else "none"
        raise Failed(f"CHANGELOG.md begins with {heading!r}; give {version!r} and the date")
    return newest[1]


@check
def vllm_pin() -> str:
    """Check that the extra ``gpu`` requires the vLLM versions that the plugin accepts."""
    sys.path.insert(0, str(ROOT))
    from vllm_triforce.config.keys import SUPPORTED_VLLM

    setup = (ROOT / "setup.cfg").read_text()
    requirement = "vllm" + ",".join(SUPPORTED_VLLM)
    if requirement not in setup:
        raise Failed(f"setup.cfg's extra gpu is not {requirement!r}")
    return requirement


@check
def ledger() -> str:
    """Check that the written tables are up to date, and that lint and types pass."""
    run(sys.executable, "tools/ledger.py", "--check")
    run("make", "lint")
    run("make", "types")
    return "current"


@check
def tests() -> str:
    """Run ``make test-all`` on this tree."""
    return run("make", "test-all").strip().splitlines()[-1]


@check
def build() -> str:
    """Build the source distribution, the wheel from it, and check the contents of both."""
    shutil.rmtree(DIST, ignore_errors=True)
    build_into(DIST)
    check_contents(DIST)
    return ", ".join(sorted(path.name for path in DIST.iterdir()))


@check
def wheel_alone() -> str:
    """Try the wheel in a new environment beside stock vLLM, away from this tree."""
    with tempfile.TemporaryDirectory() as folder:
        python = new_environment(Path(folder), next(DIST.glob("*.whl")))
        return smoke(python, Path(folder))


def build_into(folder: Path, *options: str) -> None:
    """Build wheel and source distribution by uv from a copy of the files that git knows."""
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as copy:
        for name in run("git", "ls-files", "-co", "--exclude-standard").splitlines():
            if (ROOT / name).is_file():
                (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(copy) / name)
        run(uv, "build", "--quiet", "--out-dir", folder, *options, cwd=Path(copy))
    (folder / ".gitignore").unlink(missing_ok=True)


def check_contents(folder: Path) -> None:
    """Check the files and metadata of the packages.

    Raises:
        Failed: a module is missing, or a package has files or metadata that it should not have.
    """
    wheel, source = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    packages = ("vllm_triforce", "vllm_triforce_bench")
    modules = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if missing := modules - names:
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
    if missing := (modules | {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"}) - inside:
        raise Failed(f"{source.name} lacks {sorted(missing)[:5]}")


def new_environment(folder: Path, wheel: Path) -> Path:
    """Make a virtual environment with stock vLLM's CPU build and the wheel by tools/install.sh.

    Returns:
        Path of its Python.
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
    """Compare the tokens of stock vLLM and of TriForce from an installed wheel.

    Args:
        home: folder from which the package must be imported.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    text = ROOT / "examples" / "prompts" / "held_out.txt"
    pair = (PAIR / "target", PAIR / "draft")
    output = run(python, "-c", SMOKE, home, *pair, text, cwd=home, **env)
    return next(line for line in output.splitlines() if line.startswith("TriForce metrics"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--skip", nargs="*", default=[], choices=[*CHECKS], help="checks")
    parser.add_argument("--list", action="store_true", help="list the checks, and stop")
    args = parser.parse_args()
    failed = []
    for name, function in CHECKS.items():
        summary = (function.__doc__ or "").strip().splitlines()[0]
        if args.list or name in args.skip:
            print(f"{'skipped' if not args.list else '':8}{name}: {summary}")
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
