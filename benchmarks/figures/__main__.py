"""Regenerate the front page's picture, and draw all pictures of the pages.

python -m benchmarks.figures           # measures (about 20 minutes on two cores), then draws
python -m benchmarks.figures measure   # runs or resumes the benchmark of the front page
python -m benchmarks.figures draw      # draws the stored results of docs/figures
"""

import argparse
import sys
from pathlib import Path

from benchmarks.figures import draw, measure, pages, stored


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("step", nargs="?", choices=("measure", "draw"), help="default: both")
    parser.add_argument(
        "--output",
        type=Path,
        default=stored.ROOT / "build" / "figures",
        help="folder of the benchmark's results; default: build/figures",
    )
    args = parser.parse_args()
    try:
        code = 0 if args.step == "draw" else measure.measure(args.output)
    except (measure.Incomplete, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.step != "measure" and code in measure.MEASURED:
        draw_all()
    return code


def draw_all() -> None:
    """Write the pictures, and the front page's figures in text."""
    for path, text in (draw.all_files() | pages.all_pages()).items():
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
