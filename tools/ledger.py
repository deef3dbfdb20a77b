"""Fill in the column "where" of the tables of patches/README.md, and check their rows.

Each patch and each swap has one row, with the reason and the condition for its removal, written by
hand.

python tools/ledger.py            # write the column
python tools/ledger.py --check    # exit with 1 if it is out of date
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "patches" / "README.md"
PACKAGE = ROOT / "vllm_triforce"


def users_by_table() -> dict[str, dict[str, list[str]]]:
    """List the files of each patch and swap, by table and by the name in its row."""
    from vllm_triforce.vllm_patches import PATCHES
    from vllm_triforce.vllm_patches.swaps import SWAPS

    return {
        "methods": {p.name: [_file_of(p.wrap.__module__)] for p in PATCHES},
        "objects": {swap.name: _users(name) for name, swap in SWAPS.items()},
    }


def written(text: str) -> str:
    """Return the ledger with its column of files filled in.

    Raises:
        ValueError: a table, a row or its reason is missing, or a row has no patch or swap.
    """
    for table, users in users_by_table().items():
        begin, end = f"<!-- {table}: checked by tools/ledger.py -->\n", f"<!-- end of {table} -->"
        before, found, rest = text.partition(begin)
        body, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"{LEDGER.name} has no place for {table!r}: {begin!r} to {end!r}")
        head, rule, *rows = body.splitlines(keepends=True)
        names = [row.split("`")[1] for row in rows]
        if sorted(names) != sorted(users):
            wrong = sorted({*names} ^ users.keys()) or "a name twice"
            raise ValueError(f"rows of {table} in {LEDGER.name} without a patch, or none: {wrong}")
        rows = [_with_files(row, users[name]) for row, name in zip(rows, names)]
        text = "".join((before, begin, head, rule, *rows, end, after))
    return text


def _with_files(row: str, files: list[str]) -> str:
    what, _, why, until = [cell.strip() for cell in row.strip().strip("|").split(" | ")]
    if not files:
        raise ValueError(f"nobody uses {what}: delete it")
    if not why or not until:
        raise ValueError(f"{what} has no reason, or no condition for its removal")
    return f"| {what} | {', '.join(f'`{file}`' for file in files)} | {why} | {until} |\n"


def _file_of(module: str) -> str:
    return module.removeprefix("vllm_triforce.").replace(".", "/") + ".py"


def _users(name: str) -> list[str]:
    """List the files that set the swap."""
    pattern = re.compile(rf"\bswaps\.{name}\b")
    return [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if pattern.search(path.read_text())
    ]


def main() -> int:
    old = LEDGER.read_text()
    new = written(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print("patches/README.md is out of date: run python tools/ledger.py")
        return int(new != old)
    LEDGER.write_text(new)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
