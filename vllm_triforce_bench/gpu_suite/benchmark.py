"""Times the decode steps of one geometry, of stock vLLM or of TriForce, cell by cell.

A cell is a context and a batch. Every request has a prompt of its own. Random weights accept
what they accept: what a pass costs does not depend on it, and ``speedup.py`` does the rest.
Before the cells TriForce's own measurement of passes is asked for, which it chooses by otherwise.
"""

import argparse
import time

from vllm_triforce_bench.gpu_suite.engine import (
    argument_parser,
    decode,
    make_engine,
    measured_passes,
    synchronized_times,
)
from vllm_triforce_bench.gpu_suite.geometry import GEOMETRIES, draft_of
from vllm_triforce_bench.gpu_suite.items import Items

MEASURED = "measured"
# While the last prompts are read, the first requests decode: up to 7 tokens in each of their steps.
TOKENS_PER_STEP = 8


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True)
    parser.add_argument("--budget", type=int, default=0, help="of level 2; 0 is stock vLLM")
    parser.add_argument(
        "--cells", nargs="+", required=True, help="CONTEXTxBATCH, most wanted first"
    )
    parser.add_argument("--num-steps", type=int, default=96, help="timed of each cell, at most")
    args = parser.parse_args()

    geometry = GEOMETRIES[args.geometry]
    memory = _memory_bytes(args.device)
    possible = [cell for cell in args.cells if geometry.fits(*sizes(cell), memory)]
    items = Items(
        args.result,
        geometry=args.geometry,
        budget=args.budget,
        is_compiled=not args.no_compile,
        does_not_fit=[cell for cell in args.cells if cell not in possible],
    )
    names = [MEASURED, *possible] if args.budget else possible
    items.run_all(
        names,
        lambda: _engine(args, geometry, possible),
        lambda engine, name: _item(engine, args, geometry, name),
    )
    raise SystemExit(int(items.num_errors > 0))


def sizes(cell: str) -> tuple[int, int]:
    """Context and batch."""
    context, batch = cell.split("x")
    return int(context), int(batch)


def _most_tokens(args: argparse.Namespace) -> int:
    return args.num_steps * (TOKENS_PER_STEP if args.budget else 1)


def _engine(args: argparse.Namespace, geometry, cells: list[str]):
    keys = None
    if args.budget:
        draft = draft_of(geometry).write(args.work / "models" / f"{args.geometry}-draft")
        keys = {
            "model": draft,
            "retrieval_budget": args.budget,
            "min_context": 0,
            "adaptive": False,
        }
    return make_engine(
        geometry.write(args.work / "models" / args.geometry),
        args,
        keys,
        load_format="dummy",
        dtype="bfloat16",
        gpu_memory_utilization=0.88,
        max_model_len=max(sizes(cell)[0] for cell in cells) + _most_tokens(args) + 64,
        max_num_seqs=max(sizes(cell)[1] for cell in cells),
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
    )


def _item(llm, args: argparse.Namespace, geometry, name: str) -> dict:
    if name == MEASURED:
        return measured_passes(llm, anew=True)
    return time_cell(llm, geometry, name, args.num_steps, _most_tokens(args), bool(args.budget))


def time_cell(llm, geometry, cell: str, num_steps: int, most_tokens: int, has_parts: bool) -> dict:
    """Decodes a cell with random prompts.

    Args:
        num_steps: that are timed, at most.
        most_tokens: of a request.
        has_parts: whether proposals are made, whose parts are timed too.
    """
    import torch

    is_synchronized = has_parts and synchronized_times(llm)
    context, batch = sizes(cell)
    draw = torch.Generator().manual_seed(context + batch)
    prompts = torch.randint(3, geometry.vocab, (batch, context), generator=draw).tolist()
    began = time.monotonic()
    decoded = decode(llm, prompts, most_tokens, most_steps=num_steps)
    found = {
        "num_steps": decoded.num_steps,
        "num_tokens": decoded.num_tokens,
        "step_ms": 1e3 * decoded.seconds / decoded.num_steps,
        "whole_s": time.monotonic() - began,
    }
    if decoded.counters is not None:
        found |= parts_ms(decoded.counters, decoded.num_steps, found["step_ms"])
        found["parts_are_synchronized"] = is_synchronized
    return found


def parts_ms(counters, num_steps: int, step_ms: float) -> dict:
    """Milliseconds of each part of a step, from the counters of ``num_steps`` steps.

    Before each pass of level 2, level 1 makes ``gamma`` steps (2, the default), the first of
    which feeds more than one token.
    """
    from vllm_triforce.config import TriForceConfig

    gamma = TriForceConfig().with_defaults(can_adapt=False).gamma
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


if __name__ == "__main__":
    main()
