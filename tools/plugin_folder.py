"""Makes a folder that stands in for an installation of this checkout, and prints it.

    export PYTHONPATH="$(python tools/plugin_folder.py FOLDER)"

It has links to the packages, and the entry points of setup.cfg: vLLM then finds the plugin.
"""

import configparser
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def plugin_folder(folder: Path) -> Path:
    """Makes the folder, if it is missing; returns it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = folder / "vllm_triforce-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-triforce\nVersion: 0\n")
    points = setup["options.entry_points"]
    lines = [f"[{group}]\n{points[group].strip()}\n" for group in points]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for package in ("vllm_triforce", "vllm_triforce_bench"):
        link = folder / package
        if not os.path.lexists(link):
            link.symlink_to(ROOT / package)
    return folder


if __name__ == "__main__":
    print(plugin_folder(Path(sys.argv[1]).resolve()))
