"""The grid: each world's speed over plain decoding's, and over the best fixed choice's.

python -m tests.simulation [--steps 900] [--machines "mha;gqa"] [--sizes 1,8] [--fixed]
python -m tests.simulation --halves
"""

import argparse

from tests.simulation.loads import (
    FIXED,
    Closed,
    FixedDecisions,
    decide_by,
    speeds_of_halves,
    speedup,
)
from tests.simulation.world import MACHINES, TEXTS


def found(machine: str, text: str, size: int, context: int, steps: int, fixed=None) -> float:
    load = Closed(size, context)
    engine = load.engine(MACHINES[machine], TEXTS[text])
    if fixed is not None:
        decide_by(engine, FixedDecisions(*fixed))
    load.serve(engine, steps)
    return speedup(engine, steps // 4)


def print_halves() -> None:
    """Print the speeds of both halves of a batch, by ``max_slowdown``."""
    for machine, size, context in (("gqa", 4, 100_000), ("gqa", 8, 32_000), ("mha", 4, 32_000)):
        for max_slowdown in (0.05, 0.1, 0.2, 1.0):
            good, bad = speeds_of_halves(MACHINES[machine], size, context, max_slowdown)
            print(f"{machine} {size} x {context} {max_slowdown:4}: {good:.2f}x, others {bad:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--machines", default=";".join(MACHINES), help="separated by semicolons")
    parser.add_argument("--texts", default=";".join(TEXTS), help="separated by semicolons")
    parser.add_argument("--sizes", default="1,8,64")
    parser.add_argument("--contexts", default="1000,8000,100000")
    parser.add_argument("--fixed", action="store_true", help="compare with fixed choices as well")
    parser.add_argument("--halves", action="store_true", help="half of a batch is predicted well")
    asked = parser.parse_args()
    if asked.halves:
        print_halves()
        return
    worst = 9.9
    for machine in asked.machines.split(";"):
        for size in map(int, asked.sizes.split(",")):
            for context in map(int, asked.contexts.split(",")):
                if size * context > 2_000_000:  # no machine has such a cache
                    continue
                for text in asked.texts.split(";"):
                    world = machine, text, size, context, asked.steps
                    ours = found(*world)
                    worst = min(worst, ours)
                    best = [found(*world, fixed=its) for its in FIXED] if asked.fixed else []
                    compared = f"{max(best):7.3f}" if best else ""
                    print(f"{machine:22} {size:3} {context:7} {text:18} {ours:7.3f} {compared}")
    print(f"worst {worst:.3f}")


if __name__ == "__main__":
    main()
