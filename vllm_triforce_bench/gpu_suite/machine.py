"""Makes vLLM and this plugin importable on a machine that may have neither and no network."""

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LOOK = """
import importlib.util, json
from importlib.metadata import entry_points
names = [e.name for e in entry_points(group="vllm.general_plugins")]
found = importlib.util.find_spec("vllm") is not None
print(json.dumps({"vllm": found, "plugin": "triforce" in names}))
"""


def prepare(work: Path, kit: Path | None) -> dict[str, str]:
    """Installs what is missing, once.

    Args:
        kit: folder with ``install.sh``, ``SHA256`` and ``kit.part*``; needed where vLLM is not
            installed.

    Returns:
        Environment variables for every step.

    Raises:
        RuntimeError: vLLM is missing and there is no kit, or the kit does not install.
    """
    environment = {"PYTHONPATH": _joined([ROOT], os.environ.get("PYTHONPATH"))}
    if not _look(environment)["vllm"]:
        environment = _installed_kit(work / "site", kit, environment)
    if not _look(environment)["plugin"]:
        plugin = plugin_folder(work / "plugin")
        environment["PYTHONPATH"] = _joined([plugin], environment["PYTHONPATH"])
    found = _look(environment)
    if not all(found.values()):
        raise RuntimeError(f"still missing after the installation: {found}")
    return environment


def _look(environment: dict[str, str]) -> dict[str, bool]:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT.parent,  # not this checkout: its folder is no installation
        check=True,
    )
    return json.loads(done.stdout)


def _installed_kit(site: Path, kit: Path | None, environment: dict[str, str]) -> dict[str, str]:
    if kit is None or not (kit / "install.sh").exists():
        raise RuntimeError(f"vLLM is not installed and {kit} has no install.sh; give --kit FOLDER")
    marker = site / ".installed"
    if not marker.exists():
        done = subprocess.run(
            ["bash", kit / "install.sh", kit, site], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{kit / 'install.sh'} failed: {done.stderr[-1000:]}")
        marker.write_text(done.stdout)  # a line of exports
    before = {**os.environ, **environment}
    script = f"{marker.read_text()}\nenv -0"
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=before, check=True)
    after = dict(e.split("=", 1) for e in done.stdout.decode().split("\0") if "=" in e)
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    return {**environment, **{k: v for k, v in changed.items() if k not in ("_", "SHLVL", "PWD")}}


def plugin_folder(folder: Path) -> Path:
    """Links to the packages and the entry point of setup.cfg: what an installation would leave."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    told = folder / "vllm_triforce-0.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-triforce\nVersion: 0\n")
    points = setup["options.entry_points"]
    lines = [f"[{group}]\n{points[group].strip()}\n" for group in points]
    (told / "entry_points.txt").write_text("\n".join(lines))
    for package in ("vllm_triforce", "vllm_triforce_bench"):
        link = folder / package
        if not os.path.lexists(link):
            link.symlink_to(ROOT / package)
    return folder


def _joined(first: list[Path], rest: str | None) -> str:
    return os.pathsep.join([*map(str, first), *([rest] if rest else [])])
