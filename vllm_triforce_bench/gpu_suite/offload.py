"""Times decoding over a KV cache in host memory: plainly and with TriForce.

The device has as much memory as is asked for, a smaller card's; what does not fit lies in host
memory. Random weights accept what they accept: the cost of passes does not depend on it, and
``speedup.py`` does the rest, over plain decoding.
"""

import argparse
from functools import partial

from vllm_triforce_bench.gpu_suite.benchmark import sizes, time_cell
from vllm_triforce_bench.gpu_suite.engine import argument_parser, make_engine
from vllm_triforce_bench.gpu_suite.geometry import GEOMETRIES, draft_of
from vllm_triforce_bench.gpu_suite.items import Items
from vllm_triforce_bench.gpu_suite.speedup import Costs, curve

PLAIN, TRIFORCE = "plain", "triforce"
ACCEPTANCES = [0.9, 0.93, 0.965]
# Of level 1's tokens, by level 2: what the paper's own data say.
LEVEL1 = 0.21
LENGTH = 16
_GIB = 1 << 30


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True)
    parser.add_argument("--cell", default="122000x1", metavar="CONTEXTxBATCH")
    parser.add_argument("--device-gib", type=float, default=23.5, help="of the device's memory")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--num-steps", type=int, default=16, help="timed of each way, at most")
    args = parser.parse_args()
    geometry = GEOMETRIES[args.geometry]
    items = Items(args.result, geometry=args.geometry, cell=args.cell, device_gib=args.device_gib)
    for way in (PLAIN, TRIFORCE):
        items.run_all(
            [way],
            partial(engine, args, geometry, way),
            lambda llm, way: _item(llm, args, geometry, way),
        )
    put_speedup(items)
    raise SystemExit(int(items.num_errors > 0))


def engine(args: argparse.Namespace, geometry, way: str):
    """
    Args:
        way: PLAIN or TRIFORCE.
    """
    context, batch = sizes(args.cell)
    length = context + args.num_steps * (LENGTH + 1) + 64
    host = batch * (length + 2 * LENGTH + 64) * geometry.kv_bytes_per_token / _GIB
    keys: dict = {"kv_offload_gib": round(host + 0.05, 2)}
    if way == PLAIN:
        keys |= {"levels": "3"}
    else:
        keys |= {
            "model": draft_of(geometry).write(args.work / "models" / f"{args.geometry}-draft"),
            "retrieval_budget": args.budget,
            "num_speculative_tokens": LENGTH,
            "max_speculating_seqs": batch,
            "min_context": 0,
            "adaptive": False,
        }
    return make_engine(
        geometry.write(args.work / "models" / args.geometry),
        args,
        keys,
        load_format="dummy",
        dtype="bfloat16",
        gpu_memory_utilization=0.9 * min(1.0, args.device_gib * _GIB / _total_memory()),
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )


def _item(llm, args: argparse.Namespace, geometry, way: str) -> dict:
    most = args.num_steps * (LENGTH + 1)
    found = time_cell(llm, geometry, args.cell, args.num_steps, most, way == TRIFORCE)
    (found["offload"],) = llm.collective_rpc("triforce_offload")
    staged = found["counters"]["num_staged_bytes"]
    found["staged_gb_per_step"] = staged / found["num_steps"] / 1e9
    found["staged_gb_per_s_of_steps"] = staged / (found["num_steps"] * found["step_ms"]) / 1e6
    return found


def put_speedup(items: Items) -> None:
    """By level 2's acceptance, from the two ways' times; where both were measured."""
    plain, ours = (items.found.get(way, {}) for way in (PLAIN, TRIFORCE))
    if "step_ms" not in plain or "step_ms" not in ours or "speed-up" in items.found:
        return
    costs = Costs(
        stock_step=plain["step_ms"],
        selection=ours["selection_ms"],
        level1_step=ours["level1_step_ms"],
        level2_pass=ours["level2_pass_ms"],
        verification=ours["verification_ms"],
        full_pass=ours["full_pass_ms"],
    )
    items.put("speed-up", curve(costs, ACCEPTANCES, LEVEL1, num_speculative_tokens=LENGTH))


def _total_memory() -> float:
    import torch

    return float(torch.cuda.mem_get_info()[1])


if __name__ == "__main__":
    main()
