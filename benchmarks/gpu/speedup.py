"""Speed-up at any acceptance, from the times of single passes that ``bench`` has measured.

    python -m benchmarks.gpu.speedup FOLDER      # bench --methods stock,triforce:all --pass-times

Random weights accept tokens at random, and the cost of a pass does not depend on it. A step emits
``1 + a2 + ... + a2^k`` tokens and costs

    selection + (draft passes) * level 1 + (rounds) * (level 2 + verification) + full pass
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from vllm_triforce_bench.predict.steps import inner_loop, tokens_per_step

# Acceptances of level 2 per test: the paper reports 0.92 (streaming) to 0.97 at 120K.
ACCEPTANCES = (0.7, 0.8, 0.9, 0.92, 0.95, 0.97)
# Acceptance of level 1 by level 2 in the paper's raw data.
LEVEL1_ACCEPTANCE = 0.21
# Defaults of TriForce with a draft on Model Runner V2.
LENGTH, GAMMA = 6, 2


@dataclass(frozen=True)
class Costs:
    """Milliseconds at one context and batch; ``stock_step`` is a plain decode step."""

    stock_step: float
    selection: float  # a step's share of one every ``refresh_interval`` steps
    level1_step: float
    level2_pass: float
    verification: float  # of one round
    full_pass: float  # with vLLM's work around it


def speedup(
    costs: Costs, level2_acceptance: float, level1_acceptance: float, length: int, gamma: int
) -> float:
    """Decode speed over stock vLLM's; both acceptances are per test."""
    rounds, drafts = inner_loop(level1_acceptance, length, gamma)
    step_ms = (
        costs.selection
        + drafts * costs.level1_step
        + rounds * (costs.level2_pass + costs.verification)
        + costs.full_pass
    )
    return tokens_per_step(level2_acceptance, length) * costs.stock_step / step_ms


def costs_of(stock: list[dict], triforce: list[dict]) -> Costs:
    """Compute the costs of one cell from bench's measurements of both methods."""
    measured = [record["parts"] for record in triforce]
    steps = sum(decode["num_steps"] for decode in measured)
    rounds = max(1, sum(decode["num_level2_passes"] for decode in measured))
    parts: dict[str, float] = defaultdict(float)
    for decode in measured:
        for part, seconds in decode["time_seconds"].items():
            parts[part] += 1e3 * seconds
    step_ms = 1e3 * sum(decode["seconds"] for decode in measured) / steps
    stock_ms = 1e3 * sum(record["seconds"] for record in stock)
    return Costs(
        stock_step=stock_ms / sum(record["num_steps"] for record in stock),
        selection=parts["selection"] / steps,
        level1_step=parts["level 1"] / (rounds * GAMMA),
        level2_pass=parts["level 2"] / rounds,
        verification=parts["verification"] / rounds,
        full_pass=step_ms - sum(parts.values()) / steps,
    )


def table(records: list[dict]) -> str:
    """Format the costs and speed-ups of all cells."""
    cells: dict[tuple, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        cells[record["context"], record["batch_size"]][record["method"]].append(record)
    heads = "  ".join(f"{acceptance:5.2f}" for acceptance in ACCEPTANCES)
    lines = [
        f"milliseconds; speed-up by level 2's acceptance, level 1's {LEVEL1_ACCEPTANCE}, "
        f"{LENGTH} tokens proposed",
        f"{'cell':>12}  stock   full  level2  level1  select  verify  {heads}",
    ]
    for (context, batch), methods in cells.items():
        costs = costs_of(methods["stock"], methods["triforce:all"])
        gains = (speedup(costs, a, LEVEL1_ACCEPTANCE, LENGTH, GAMMA) for a in ACCEPTANCES)
        lines.append(
            f"{f'{context} x {batch}':>12} {costs.stock_step:6.1f} {costs.full_pass:6.1f} "
            f"{costs.level2_pass:7.2f} {costs.level1_step:7.2f} {costs.selection:7.2f} "
            f"{costs.verification:7.2f}  " + "  ".join(f"{gain:5.2f}" for gain in gains)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    text = (Path(sys.argv[1]) / "results.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    if not any("parts" in record for record in records):
        sys.exit(f"{sys.argv[1]} has no times of parts: run bench with --pass-times")
    print(table(records))
