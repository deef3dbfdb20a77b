"""Projects of others, installed beside vllm-triforce: a module and entry points."""

from pathlib import Path

GROUP = "vllm_triforce.selection_policies"
POLICY = """
from vllm_triforce.selection import SelectionPolicy

class Newest(SelectionPolicy):
    name = "newest"

    def score(self, query, summaries, num_chunks):
        raise NotImplementedError

class Open(SelectionPolicy):
    name = "open"
"""
BROKEN = {
    "misnamed": "broken_module:Newest",
    "no_class": "broken_module:Oldest",
    "no_module": "no_such_module:Newest",
}
"""Entry points over ``POLICY`` in a project "broken", each wrong in its own way."""


def put_project(
    parent: Path, name: str, entry_points: dict[str, str], module: str = POLICY, group: str = GROUP
) -> Path:
    """Write a project with entry points; return the folder for the path."""
    folder = parent / name
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}_module.py").write_text(module)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return folder
