"""Fetch single source files of a released vLLM from its wheel by HTTP ranges (a few MB of 340).

    python tools/vllm_source.py 0.33.0 build/vllm-0.33.0 config/speculative.py v1/outputs.py

pip resolves the address of the wheel, from the index that it is configured for.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import aiohttp
import fsspec

_CLIENT = {"trust_env": True}  # a proxy, as pip takes it


def wheel_url(version: str) -> str:
    """Return the address from which pip would download vLLM's CUDA wheel.

    Raises:
        RuntimeError: pip does not find the version, or has no network.
    """
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"),
        *("--retries", "1", "--timeout", "15"),
        *("--ignore-installed", "--target", "unused", "--only-binary=:all:"),
        *("--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"),
        *("--implementation", "cp", "--use-feature=fast-deps", "--report", "-"),
        f"vllm=={version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip does not find vllm=={version}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)["install"][0]["download_info"]["url"]


def fetch(version: str, folder: Path, files: list[str]) -> Path:
    """Write ``vllm/<file>`` for each of ``files`` below ``folder``; existing files stay.

    Returns:
        ``folder / "vllm"``. Files that the release lacks are skipped.

    Raises:
        RuntimeError: pip does not find the version, or there is no network.
    """
    root = folder / "vllm"
    missing = [file for file in files if not (root / file).exists()]
    if not missing:
        return root
    remote = fsspec.open(wheel_url(version), block_size=1 << 18, client_kwargs=_CLIENT)
    try:
        with remote as file, zipfile.ZipFile(file) as wheel:
            names = set(wheel.namelist())
            for name in missing:
                if f"vllm/{name}" in names:
                    wheel.extract(f"vllm/{name}", folder)
    except aiohttp.ClientError as error:
        raise RuntimeError(f"the wheel of vllm=={version} cannot be read: {error}") from error
    return root


if __name__ == "__main__":
    print(fetch(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
