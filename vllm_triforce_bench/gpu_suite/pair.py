"""A pair trained on this machine: its acceptance, and its speed against stock vLLM.

Held-out source code, greedy; the engines one after the other in this process.
"""

import argparse
from functools import partial

from vllm_triforce_bench.gpu_suite.engine import argument_parser, decode, make_engine
from vllm_triforce_bench.gpu_suite.items import Items

STOCK = "stock"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", required=True, help="folder with target and draft")
    parser.add_argument("--cells", nargs="+", required=True, help="CONTEXTxBATCH")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--num-tokens", type=int, default=192)
    args = parser.parse_args()
    cells = {cell: tuple(map(int, cell.split("x"))) for cell in args.cells}
    items = Items(args.result)

    def stock(llm, name: str) -> dict:
        context, batch = cells[name.removeprefix(f"{STOCK} ")]
        decoded = decode(llm, _prompts(args, context, batch), args.num_tokens)
        rate = decoded.num_tokens / decoded.seconds
        return {"tokens_per_s": rate, "token_ids": decoded.token_ids}

    names = [f"{STOCK} {cell}" for cell in cells]
    items.run_all(names, lambda: _engine(args, None, cells), stock)
    for budget in args.budgets:
        names = [
            f"{budget} {cell}" for cell in cells if "error" not in items.found[f"{STOCK} {cell}"]
        ]
        keys = {"retrieval_budget": budget, "min_context": 0, "adaptive": False}

        def ours(llm, name: str, budget: int = budget) -> dict:
            cell = name.removeprefix(f"{budget} ")
            decoded = decode(llm, _prompts(args, *cells[cell]), args.num_tokens)
            return _compare(cells[cell], budget, items.found[f"{STOCK} {cell}"], decoded)

        items.run_all(names, partial(_engine, args, keys, cells), ours)
    raise SystemExit(int(items.num_errors > 0))


def _engine(args: argparse.Namespace, keys: dict | None, cells):
    return make_engine(
        f"{args.models}/target",
        args,
        None if keys is None else {**keys, "model": f"{args.models}/draft"},
        dtype="bfloat16",
        gpu_memory_utilization=0.4,
        max_model_len=max(context for context, _ in cells.values()) + args.num_tokens + 64,
        max_num_seqs=max(batch for _, batch in cells.values()),
    )


def _prompts(args: argparse.Namespace, context: int, batch: int) -> list[list[int]]:
    """Stretches of the held-out text, which is repeated where it is too short."""
    from transformers import AutoTokenizer

    from tests.models import PROMPTS

    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/target")
    ids = tokenizer((PROMPTS / "held_out.txt").read_text())["input_ids"]
    stride = max(1, len(ids) // batch)
    long = ids * (2 + (context + stride * batch) // len(ids))
    return [long[stride * i :][:context] for i in range(batch)]


def _compare(cell, budget: int, plain: dict, decoded) -> dict:
    same = [a == b for a, b in zip(plain["token_ids"], decoded.token_ids)]
    return {
        "context": cell[0],
        "batch": cell[1],
        "budget": budget,
        "stock_tokens_per_s": plain["tokens_per_s"],
        "speedup": decoded.num_tokens / decoded.seconds / plain["tokens_per_s"],
        "share_of_requests_identical": sum(same) / len(same),
        "counters": decoded.counters.to_dict(),
    }


if __name__ == "__main__":
    main()
