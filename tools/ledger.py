"""Generate the tables of patches/README.md from the declarations of the patches.

python tools/ledger.py            # write the tables
python tools/ledger.py --check    # exit with 1 if they are out of date
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "patches" / "README.md"
PACKAGE = ROOT / "vllm_triforce"
_HEAD = "| what | where | why | delete when |\n|---|---|---|---|\n"


def tables() -> dict[str, str]:
    """Return the generated tables by their name in the ledger's comments."""
    from vllm_triforce.vllm_patches import PATCHES
    from vllm_triforce.vllm_patches.swaps import SWAPS

    methods = [(p.name, [_file_of(p.wrap.__module__)], p.why, p.until) for p in PATCHES]
    objects = [(s.name, _users(name), s.why, s.until) for name, s in SWAPS.items()]
    return {"methods": _table(methods), "objects": _table(objects)}


def written(text: str) -> str:
    """Return the ledger with its tables regenerated."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: made by tools/ledger.py -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if not re.search(pattern, text, re.S):
            raise ValueError(f"{LEDGER.name} has no place for {name!r}: {begin!r} to {end!r}")
        text = re.sub(pattern, lambda _, new=begin + table + end: new, text, flags=re.S)
    return text


def _table(rows) -> str:
    lines = []
    for what, files, why, until in rows:
        if not files:
            raise ValueError(f"nobody uses {what!r}: delete it")
        where = ", ".join(f"`{file}`" for file in files)
        lines.append(f"| `{what}` | {where} | {why} | {until} |\n")
    return _HEAD + "".join(lines)


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
