"""Single source files of a released vLLM, read out of its wheel by HTTP ranges (a few MB of 340).

    python tools/vllm_source.py 0.33.0 build/vllm-0.33.0 config/speculative.py v1/outputs.py

pip says where the wheel is, from whatever index it is set up for.
"""

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path


class RangeFile(io.RawIOBase):
    """A remote file, read in pieces of at least ``ahead`` bytes."""

    def __init__(self, url: str, ahead: int = 1 << 18) -> None:
        self._url, self._ahead, self._place = url, ahead, 0
        self._piece, self._piece_start = b"", 0
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=30
        ) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer) -> int:
        wanted = min(len(buffer), self._size - self._place)
        if wanted <= 0:
            return 0
        start = self._place - self._piece_start
        if start < 0 or start + wanted > len(self._piece):
            last = min(self._size, self._place + max(wanted, self._ahead)) - 1
            request = urllib.request.Request(
                self._url, headers={"Range": f"bytes={self._place}-{last}"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                self._piece, self._piece_start, start = answer.read(), self._place, 0
        buffer[:wanted] = self._piece[start : start + wanted]
        self._place += wanted
        return wanted


def wheel_url(version: str) -> str:
    """Where pip would get vLLM's CUDA wheel.

    Raises:
        RuntimeError: pip does not find it (no network, or no such version).
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
    """Writes ``vllm/<file>`` for each of ``files`` below ``folder``; what is there stays.

    Returns:
        ``folder / "vllm"``. Files that the release does not have are left out.
    """
    root = folder / "vllm"
    missing = [file for file in files if not (root / file).exists()]
    if missing:
        with zipfile.ZipFile(RangeFile(wheel_url(version))) as wheel:
            known = set(wheel.namelist())
            for file in missing:
                if f"vllm/{file}" in known:
                    wheel.extract(f"vllm/{file}", folder)
    return root


if __name__ == "__main__":
    print(fetch(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
