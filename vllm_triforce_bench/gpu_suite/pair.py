"""A pair trained on this machine: its acceptance, and its speed against stock vLLM.

Held-out source code, greedy and sampled; both engines in this process, one right after the other.
"""

import argparse
import gc
import json
from pathlib import Path

from vllm_triforce_bench.gpu_suite.engine import decode, make_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="folder with target and draft")
    parser.add_argument("--cells", nargs="+", required=True, help="CONTEXTxBATCH")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--num-tokens", type=int, default=192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    target, draft = str(args.models / "target"), str(args.models / "draft")

    stock = _engine(args, target, None, cells)
    plain = {cell: decode(stock, _prompts(target, *cell), args.num_tokens) for cell in cells}
    found: list[dict] = []
    for budget in args.budgets:
        keys = {"model": draft, "retrieval_budget": budget, "min_context": 0, "adaptive": False}
        llm = _engine(args, target, keys, cells)
        for cell in cells:
            decoded = decode(llm, _prompts(target, *cell), args.num_tokens)
            found.append(_compare(cell, budget, plain[cell], decoded))
            args.result.write_text(json.dumps({"cells": found}))
        del llm
        gc.collect()


def _engine(args, target, keys, cells):
    return make_engine(
        target,
        args.device,
        keys,
        max_model_len=max(context for context, _ in cells) + args.num_tokens + 64,
        max_num_seqs=max(batch for _, batch in cells),
        **({"attention_backend": args.backend} if args.backend else {}),
        **({"dtype": "bfloat16", "gpu_memory_utilization": 0.4} if args.device != "cpu" else {}),
    )


def _prompts(target: str, context: int, batch: int) -> list[list[int]]:
    """Stretches of the held-out text, which is repeated where it is too short."""
    from transformers import AutoTokenizer

    from tests.models import PROMPTS

    text = AutoTokenizer.from_pretrained(target)((PROMPTS / "held_out.txt").read_text())
    ids = text["input_ids"]
    stride = max(1, len(ids) // batch)
    long = ids * (2 + (context + stride * batch) // len(ids))
    return [long[stride * i :][:context] for i in range(batch)]


def _compare(cell, budget: int, plain, decoded) -> dict:
    rate = plain.num_tokens / plain.seconds
    same = [a == b for a, b in zip(plain.token_ids, decoded.token_ids)]
    return {
        "context": cell[0],
        "batch": cell[1],
        "budget": budget,
        "stock_tokens_per_s": rate,
        "speedup": decoded.num_tokens / decoded.seconds / rate,
        "share_of_requests_identical": sum(same) / len(same),
        "counters": decoded.counters.to_dict(),
    }


if __name__ == "__main__":
    main()
