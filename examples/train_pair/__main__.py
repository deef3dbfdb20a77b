"""``python examples/train_pair``"""

import sys
from pathlib import Path

# Run as a folder, its files would be modules without a package.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train_pair.command import main  # noqa: E402

if __name__ == "__main__":
    main()
