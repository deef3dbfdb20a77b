"""The CUDA fat binaries inside a shared library (ELF, 64-bit, little endian): what is in them, and
the library without the code of other chips.

    fatbin.py list FILE
    fatbin.py thin FILE OUT [SM]        SM 90 unless another is named
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
    """Code for one chip; ``start`` and ``size`` are with its header."""

    start: int
    size: int
    kind: int
    sm: int


def _section(data: bytearray, wanted: str) -> tuple[int, int]:
    """Where a section lies, and its size."""
    headers = struct.unpack_from("<Q", data, 0x28)[0]
    size, number, names_at = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, headers + i * size) for i in range(number)]
    names = sections[names_at][4]
    for section in sections:
        start = names + section[0]
        if data[start : data.index(0, start)].decode() == wanted:
            return section[4], section[5]
    raise ValueError(f"the library has no section {wanted}: it holds no CUDA code")


def containers(data: bytearray) -> Iterator[Container]:
    place, size = _section(data, ".nv_fatbin")
    end = place + size
    while place < end - 16:
        magic, _, header_size, body_size = struct.unpack_from("<IHHQ", data, place)
        if magic != MAGIC:
            place += 8
            continue
        yield Container(place, header_size, body_size)
        place += header_size + body_size


def entries(data: bytearray, container: Container) -> Iterator[Entry]:
    place = container.start + container.header_size
    end = place + container.body_size
    while place < end:
        kind, _, header_size, size = struct.unpack_from("<HHIQ", data, place)
        (sm,) = struct.unpack_from("<I", data, place + 28)
        yield Entry(place, header_size + size, kind, sm)
        place += header_size + size


def kept(found: list[Entry], sm: int) -> list[Entry]:
    """A chip's own code, else the newest PTX that it can be compiled from; the smallest entry where
    there is neither, for the container to stay well formed."""
    own = [entry for entry in found if (entry.kind, entry.sm) == (CUBIN, sm)]
    ptx = [entry for entry in found if entry.kind == PTX and entry.sm <= sm]
    if own or not ptx:
        return own or [min(found, key=lambda entry: entry.size)]
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
    """In place: entries move together, and zeros follow; the file compresses all the better.

    Returns:
        bytes kept and dropped.
    """
    num_kept = num_dropped = 0
    for container in list(containers(data)):
        chosen = kept(list(entries(data, container)), sm)
        body = b"".join(data[entry.start : entry.start + entry.size] for entry in chosen)
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
