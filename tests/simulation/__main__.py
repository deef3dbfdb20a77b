"""The grid: each world's speed over plain decoding's.

python -m tests.simulation [--steps 900] [--halves]
"""

import argparse
import itertools

from tests.simulation.loads import Closed, speeds_of_halves, speedup
from tests.simulation.world import MACHINES, TEXTS


def print_halves() -> None:
    """Print the speeds of both halves of a batch, by ``max_slowdown``."""
    for machine, size, context in (("gqa", 4, 100_000), ("gqa", 8, 32_000), ("mha", 4, 32_000)):
        for max_slowdown in (0.05, 0.1, 0.2, 1.0):
            good, bad = speeds_of_halves(MACHINES[machine], size, context, max_slowdown)
            print(f"{machine} {size} x {context} {max_slowdown:4}: {good:.2f}x, others {bad:.2f}x")


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
