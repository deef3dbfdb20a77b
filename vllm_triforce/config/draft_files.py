"""A draft's weight files, checked by their headers before the target loads."""

import json
import os
import struct
from pathlib import Path

# safetensors refuses larger headers too.
_MAX_HEADER_BYTES = 100_000_000


def check_draft_files(folder: str) -> None:
    """Refuses truncated or unreadable safetensors files in a local folder; reads no weights.

    Raises:
        ValueError: a file is not whole; names the file and the remedy.
    """
    for path in sorted(Path(folder).glob("*.safetensors")):
        if (fault := _fault(path)) is not None:
            raise ValueError(
                f"draft model {folder!r}: {path.name} {fault}; copy or download the file again, "
                "or leave 'model' out of speculative_config for prompt lookup"
            )


def _fault(path: Path) -> str | None:
    size = os.path.getsize(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return f"has only {size} bytes"
        header_bytes = struct.unpack("<Q", prefix)[0]
        if header_bytes > _MAX_HEADER_BYTES or 8 + header_bytes > size:
            return f"is truncated or not a safetensors file ({size} bytes)"
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "has an unreadable header"
    wanted = 8 + header_bytes + max(ends, default=0)
    if wanted != size:
        return f"should have {wanted} bytes and has {size}"
    return None
