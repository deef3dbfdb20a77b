"""Write the tables of patches/README.md.

That of wrapped methods is generated from the declarations of the patches. In that of objects, each
swap has a row with its reason and the condition for its removal, written by hand, and the column of
files is filled in.

python tools/ledger.py            # write the tables
python tools/ledger.py --check    # exit with 1 if they are out of date
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "patches" / "README.md"
PACKAGE = ROOT / "vllm_triforce"


def written(text: str) -> str:
    """Return the ledger with its tables written.

    Raises:
        ValueError: a table is missing; a swap has no row, no reason or no user; or a row no swap.
    """
    from vllm_triforce.vllm_patches import PATCHES
    from vllm_triforce.vllm_patches.swaps import SWAPS

    methods = [(p.name, [_file_of(p.function.__module__)], p.why, p.until) for p in PATCHES]
    text = _with_table(text, "methods", lambda _: methods)
    users = {swap.name: _users(name) for name, swap in SWAPS.items()}
    return _with_table(text, "objects", lambda rows: _with_files(rows, users))


def _with_table(text: str, name: str, make_rows) -> str:
    """Replace a table's rows by those that ``make_rows`` makes of their old lines."""
    begin, end = f"<!-- {name}: made by tools/ledger.py -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    body, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{LEDGER.name} has no place for {name!r}: {begin!r} to {end!r}")
    head, rule, *lines = body.splitlines(keepends=True)
    rows = [
        f"| `{what}` | {', '.join(f'`{file}`' for file in files)} | {why} | {until} |\n"
        for what, files, why, until in make_rows(lines)
    ]
    return "".join((before, begin, head, rule, *rows, end, after))


def _with_files(lines: list[str], users: dict[str, list[str]]) -> list[tuple]:
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    rows = {what.strip("`"): (why, until) for what, _, why, until in cells}
    if wrong := rows.keys() ^ users.keys():
        raise ValueError(f"{sorted(wrong)} have a row of {LEDGER.name} without a swap, or no row")
    for what, (why, until) in rows.items():
        if not users[what]:
            raise ValueError(f"nobody uses {what!r}: delete it")
        if not why or not until:
            raise ValueError(f"{what!r} has no reason, or no condition for its removal")
    return [(what, users[what], *reasons) for what, reasons in rows.items()]


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
