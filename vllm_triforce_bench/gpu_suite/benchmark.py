"""Times the decode steps of one geometry, of stock vLLM or of TriForce, cell by cell.

A cell is a context and a batch. Every request has a prompt of its own. Random weights accept
what they accept: what a pass costs does not depend on it, and ``speedup.py`` does the rest.
Written after every cell, so what a cut-off run measured is not lost; cells that are there from
an earlier run are not measured again.
"""

import argparse
import json
import os
import time
from pathlib import Path

from vllm_triforce_bench.gpu_suite.engine import decode, make_engine, synchronized_times
from vllm_triforce_bench.gpu_suite.geometry import GEOMETRIES, draft_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True)
    parser.add_argument("--budget", type=int, default=0, help="of level 2; 0 is stock vLLM")
    parser.add_argument(
        "--cells", nargs="+", required=True, help="CONTEXTxBATCH, most wanted first"
    )
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    geometry = GEOMETRIES[args.geometry]
    memory = _memory_bytes(args.device)
    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    possible = [cell for cell in cells if geometry.fits(*cell, memory)]
    kept = args.work / "cells" / f"{args.geometry}-{args.budget}.json"
    found = json.loads(kept.read_text()) if kept.exists() else {"cells": {}}
    found |= {"geometry": args.geometry, "budget": args.budget}
    found["does_not_fit"] = [f"{c}x{b}" for c, b in cells if (c, b) not in possible]
    missing = [cell for cell in possible if f"{cell[0]}x{cell[1]}" not in found["cells"]]
    if missing:
        began = time.monotonic()
        llm = _engine(args, geometry, possible)
        found["start_s"] = time.monotonic() - began
        found["parts_are_synchronized"] = bool(args.budget) and synchronized_times(llm)
        for context, batch in missing:
            found["cells"][f"{context}x{batch}"] = _cell(llm, args, geometry, context, batch)
            _write(found, kept, args.result)
    _write(found, kept, args.result)


def _engine(args, geometry, cells):
    keys = None
    if args.budget:
        draft = draft_of(geometry).write(args.work / "models" / f"{args.geometry}-draft")
        keys = {
            "model": draft,
            "retrieval_budget": args.budget,
            "min_context": 0,
            "adaptive": False,
        }
    limits = {} if args.device == "cpu" else {"dtype": "bfloat16", "gpu_memory_utilization": 0.88}
    if args.backend:
        limits["attention_backend"] = args.backend
    return make_engine(
        geometry.write(args.work / "models" / args.geometry),
        args.device,
        keys,
        load_format="dummy",
        max_model_len=max(context for context, _ in cells) + args.num_tokens + 64,
        max_num_seqs=max(batch for _, batch in cells),
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
        **limits,
    )


def _cell(llm, args, geometry, context: int, batch: int) -> dict:
    import torch

    draw = torch.Generator().manual_seed(context + batch)
    prompts = torch.randint(3, geometry.vocab, (batch, context), generator=draw).tolist()
    began = time.monotonic()
    decoded = decode(llm, prompts, args.num_tokens)
    cell = {
        "num_steps": decoded.num_steps,
        "num_tokens": decoded.num_tokens,
        "step_ms": 1e3 * decoded.seconds / decoded.num_steps,
        "whole_s": time.monotonic() - began,
    }
    if decoded.counters is not None:
        cell |= parts_ms(decoded.counters, decoded.num_steps, cell["step_ms"])
    return cell


def parts_ms(counters, num_steps: int, step_ms: float) -> dict:
    """Milliseconds of each part of a step, from the counters of ``num_steps`` steps.

    Before each pass of level 2, level 1 makes ``gamma`` steps (2, the default), the first of
    which feeds more than one token.
    """
    from vllm_triforce.config import TriForceConfig

    gamma = TriForceConfig().fill(can_adapt=False).gamma
    spent = {part: 1e3 * seconds for part, seconds in counters.time_seconds.items()}
    rounds = max(counters.num_level2_passes, 1)
    level1_steps = rounds * gamma
    propose = sum(spent.values()) / num_steps
    return {
        "selection_ms": spent.get("selection", 0.0) / num_steps,
        "level1_step_ms": spent.get("level 1", 0.0) / level1_steps,
        "level2_pass_ms": spent.get("level 2", 0.0) / rounds,
        "verification_ms": spent.get("verification", 0.0) / rounds,
        "propose_ms": propose,
        "full_pass_ms": step_ms - propose,
        "rounds_per_step": rounds / num_steps,
        "counters": counters.to_dict(),
    }


def _memory_bytes(device: str) -> float:
    import torch

    return float(torch.cuda.mem_get_info()[1]) if device != "cpu" else 16e9


def _write(found: dict, *paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(found))
        os.replace(fresh, path)


if __name__ == "__main__":
    main()
