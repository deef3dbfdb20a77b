"""The grid: each world's speed over plain decoding's.

python -m tests.simulation [--steps 900] [--halves]
"""

import argparse
import itertools

from tests.simulation.loads import Closed, speeds_of_halves, speedup
from tests.simulation.world import HOPELESS, MACHINES, TEXTS, Text


def print_halves() -> None:
    """Print the speeds of both halves of a batch, by ``max_slowdown``."""
    others = {"hopeless": HOPELESS} | {
        f"{level2}, {level1}": Text(level2, level1, lookup=0.1)
        for level2, level1 in ((0.95, 0.2), (0.85, 0.2), (0.7, 0.2))
    }
    for (machine, size, context), (name, text) in itertools.product(
        (("gqa", 4, 100_000), ("gqa", 8, 32_000), ("mha", 4, 32_000)), others.items()
    ):
        for max_slowdown in (0.05, 0.1, 0.2, 1.0):
            good, bad = speeds_of_halves(MACHINES[machine], size, context, max_slowdown, text)
            print(
                f"{machine} {size} x {context}, others {name}, {max_slowdown:4}: "
                f"{good:.2f}x, others {bad:.2f}x",
                flush=True,
            )


def print_grid(num_steps: int) -> None:
    for machine, size, context, text in itertools.product(
        MACHINES, (1, 8, 64), (1000, 8000, 100_000), TEXTS
    ):
        if size * context <= 2_000_000:  # no machine has a larger cache
            load = Closed(size, context)
            engine = load.engine(MACHINES[machine], TEXTS[text])
            load.serve(engine, num_steps)
            speed = speedup(engine, num_steps // 4)
            print(f"{machine:22} {size:3} {context:7} {text:18} {speed:7.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--halves", action="store_true", help="half of a batch is predicted well")
    asked = parser.parse_args()
    print_halves() if asked.halves else print_grid(asked.steps)
