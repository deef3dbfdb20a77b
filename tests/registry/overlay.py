"""A patched vLLM beside the installed one: links to it, and copies of what a diff touches."""

import shutil
import subprocess
from pathlib import Path


def touched_files(diff: Path) -> list[Path]:
    """Return the files that a diff changes or adds."""
    lines = diff.read_text().splitlines()
    return [Path(line.removeprefix("+++ b/")) for line in lines if line.startswith("+++ b/")]


def patched_vllm(installed: Path, diff: Path, folder: Path) -> Path:
    """Make ``folder`` for PYTHONPATH, with ``vllm`` as the diff wants it.

    Args:
        installed: the folder ``vllm`` of the installed one, which is not changed.
    """
    touched = [p.relative_to("vllm") for p in touched_files(diff) if p.parts[0] == "vllm"]
    _link(installed, folder / "vllm", touched)
    subprocess.run(["git", "apply", diff.resolve()], cwd=folder, check=True)
    return folder


def _link(source: Path, target: Path, touched: list[Path]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        inside = [Path(*p.parts[1:]) for p in touched if p.parts[0] == entry.name]
        if not inside:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            _link(entry, target / entry.name, inside)
        else:
            shutil.copy(entry, target / entry.name)
