"""Entry point of ``python examples/train_head``."""

import sys
from pathlib import Path

# Python runs a folder without its package, which relative imports need.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train_head.command import main  # noqa: E402

if __name__ == "__main__":
    main()
