"""List the CUDA code in a shared library (64-bit, little-endian ELF), or drop other chips' code.

fatbin.py list FILE
fatbin.py thin FILE OUT [SM]        default SM: 90
"""

import collections
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
KINDS = {PTX: "ptx", CUBIN: "cubin"}


@dataclass(frozen=True)
class Container:
    start: int
    header_size: int
    body_size: int


@dataclass(frozen=True)
class Entry:
    """Code for one chip; ``start`` and ``size`` include the header."""

    start: int
    size: int
    kind: int
    sm: int


def _section(data: bytearray, name: str) -> tuple[int, int]:
    """Return the offset and size of a section."""
    headers = struct.unpack_from("<Q", data, 0x28)[0]
    size, number, names_at = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, headers + i * size) for i in range(number)]
    names = sections[names_at][4]
    for section in sections:
        start = names + section[0]
        if data[start : data.index(0, start)].decode() == name:
            return section[4], section[5]
    raise ValueError(f"the library has no section {name}: it holds no CUDA code")


def containers(data: bytearray) -> Iterator[Container]:
    offset, size = _section(data, ".nv_fatbin")
    end = offset + size
    while offset < end - 16:
        magic, _, header_size, body_size = struct.unpack_from("<IHHQ", data, offset)
        if magic != MAGIC:
            offset += 8
            continue
        yield Container(offset, header_size, body_size)
        offset += header_size + body_size


def entries(data: bytearray, container: Container) -> Iterator[Entry]:
    offset = container.start + container.header_size
    end = offset + container.body_size
    while offset < end:
        kind, _, header_size, size = struct.unpack_from("<HHIQ", data, offset)
        (sm,) = struct.unpack_from("<I", data, offset + 28)
        yield Entry(offset, header_size + size, kind, sm)
        offset += header_size + size


def select_entries(all_entries: list[Entry], sm: int) -> list[Entry]:
    """Select a chip's cubins, else the newest PTX that can be compiled for it.

    Where there is neither, the smallest entry is kept, so that the container stays well formed.
    """
    cubins = [entry for entry in all_entries if (entry.kind, entry.sm) == (CUBIN, sm)]
    ptx = [entry for entry in all_entries if entry.kind == PTX and entry.sm <= sm]
    if cubins or not ptx:
        return cubins or [min(all_entries, key=lambda entry: entry.size)]
    newest = max(entry.sm for entry in ptx)
    return [entry for entry in ptx if entry.sm == newest]


def show(data: bytearray) -> None:
    sizes, counts = collections.Counter(), collections.Counter()
    for container in containers(data):
        for entry in entries(data, container):
            key = KINDS.get(entry.kind, str(entry.kind)), entry.sm
            sizes[key] += entry.size
            counts[key] += 1
    for (kind, sm), size in sorted(sizes.items()):
        print(f"{kind:6} sm_{sm:<4} {counts[kind, sm]:6} entries {size:12} bytes")


def thin(data: bytearray, sm: int) -> tuple[int, int]:
    """Drop other chips' code in place; zeros fill the gaps, so that the file compresses well.

    Returns:
        Bytes kept and dropped.
    """
    num_kept = num_dropped = 0
    for container in list(containers(data)):
        selected = select_entries(list(entries(data, container)), sm)
        body = b"".join(data[entry.start : entry.start + entry.size] for entry in selected)
        start = container.start + container.header_size
        data[start : start + container.body_size] = body.ljust(container.body_size, b"\0")
        struct.pack_into("<Q", data, container.start + 8, len(body))
        num_kept += len(body)
        num_dropped += container.body_size - len(body)
    return num_kept, num_dropped


def main() -> None:
    match sys.argv[1:]:
        case ["list", file]:
            show(bytearray(Path(file).read_bytes()))
        case ["thin", file, out, *sm] if len(sm) <= 1:
            data = bytearray(Path(file).read_bytes())
            num_kept, num_dropped = thin(data, int(sm[0]) if sm else 90)
            Path(out).write_bytes(data)
            print(f"kept {num_kept} bytes of code, dropped {num_dropped}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
