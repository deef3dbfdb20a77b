"""The grid: each world's speed over plain decoding's, and over the best fixed choice's.

python -m tests.simulation [--steps 900] [--machines mha,gqa] [--sizes 1,8] [--fixed]
"""

import argparse

from tests.simulation.loads import FIXED, Closed, FixedDecisions, decide_by, speedup
from tests.simulation.world import MACHINES, TEXTS


def found(machine: str, text: str, size: int, context: int, steps: int, fixed=None) -> float:
    load = Closed(size, context)
    engine = load.engine(MACHINES[machine], TEXTS[text])
    if fixed is not None:
        decide_by(engine, FixedDecisions(*fixed))
    load.serve(engine, steps)
    return speedup(engine, steps // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--machines", default=";".join(MACHINES), help="separated by semicolons")
    parser.add_argument("--texts", default=";".join(TEXTS), help="separated by semicolons")
    parser.add_argument("--sizes", default="1,8,64")
    parser.add_argument("--contexts", default="1000,8000,100000")
    parser.add_argument("--fixed", action="store_true", help="compare with fixed choices as well")
    asked = parser.parse_args()
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
