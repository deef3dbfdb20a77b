"""Fetch single source files of a released vLLM from its wheel by HTTP ranges (a few MB of 340).

    python tools/vllm_source.py 0.33.0 build/vllm-0.33.0 config/speculative.py v1/outputs.py

pip resolves the address of the wheel, from the index that it is configured for.
"""

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path


class RangeFile(io.RawIOBase):
    """Remote file that is read in chunks of at least ``min_bytes``."""

    def __init__(self, url: str, min_bytes: int = 1 << 18) -> None:
        self._url, self._min_bytes, self._offset = url, min_bytes, 0
        self._chunk, self._chunk_start = b"", 0
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=30
        ) as response:
            self._size = int(response.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + (0, self._offset, self._size)[whence]
        return self._offset

    def readinto(self, buffer) -> int:
        num_bytes = min(len(buffer), self._size - self._offset)
        if num_bytes <= 0:
            return 0
        start = self._offset - self._chunk_start
        if start < 0 or start + num_bytes > len(self._chunk):
            last = min(self._size, self._offset + max(num_bytes, self._min_bytes)) - 1
            request = urllib.request.Request(
                self._url, headers={"Range": f"bytes={self._offset}-{last}"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                self._chunk, self._chunk_start, start = response.read(), self._offset, 0
        buffer[:num_bytes] = self._chunk[start : start + num_bytes]
        self._offset += num_bytes
        return num_bytes


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
    """
    root = folder / "vllm"
    missing = [file for file in files if not (root / file).exists()]
    if missing:
        with zipfile.ZipFile(RangeFile(wheel_url(version))) as wheel:
            names = set(wheel.namelist())
            for file in missing:
                if f"vllm/{file}" in names:
                    wheel.extract(f"vllm/{file}", folder)
    return root


if __name__ == "__main__":
    print(fetch(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
