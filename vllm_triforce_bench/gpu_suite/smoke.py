"""Can the rest run on this machine? A ladder of rungs, each recorded at once.

vLLM and the plugin are imported; then a small model answers two prompts, eagerly and with what
serving uses, from stock vLLM and with TriForce. At the end TriForce chooses, by what it measures
of passes at start-up. A rung that fails, or hangs, is one.
"""

import argparse
import platform
from functools import partial

from vllm_triforce_bench.gpu_suite.engine import (
    argument_parser,
    decode,
    make_engine,
    measured_passes,
)
from vllm_triforce_bench.gpu_suite.geometry import GEOMETRIES, draft_of
from vllm_triforce_bench.gpu_suite.items import Items, release_memory
from vllm_triforce_bench.gpu_suite.ladder import CHOOSING, IMPORT, STOCK, TRIFORCE, modes, rung

# Of one rung: a first compilation, a hang.
LIMIT_S = 150
NUM_TOKENS = 24
KEYS = {"retrieval_budget": 256}
FIXED = {"min_context": 0, "adaptive": False}


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    items = Items(args.result, LIMIT_S)
    items.run(IMPORT, lambda: imports(args))
    for mode in modes(args.device, args.no_compile):
        items.run(rung(mode, STOCK), partial(answer, args, mode, None))
        items.run(rung(mode, TRIFORCE), partial(answer, args, mode, KEYS | FIXED))
    items.run(rung(mode, CHOOSING), partial(answer, args, mode, KEYS))
    print({name: item.get("error", "ok") for name, item in items.found.items()})
    raise SystemExit(int(items.num_errors > 0))


def imports(args: argparse.Namespace) -> dict:
    """Versions, and the device, which multiplies a matrix."""
    import torch
    import vllm

    import vllm_triforce

    found: dict = {
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "device": platform.machine(),
    }
    found["plugin"] = vllm_triforce.__file__
    if args.device != "cpu":
        found["device"] = torch.cuda.get_device_name()
        found["memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
        found["cuda"] = torch.version.cuda
        found["capability"] = torch.cuda.get_device_capability()
        ones = torch.ones(64, 64, device=args.device)
        assert float((ones @ ones).sum()) == 64**3
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        found["flash_attention"] = get_flash_attn_version()
    return found


def answer(args: argparse.Namespace, mode: str, keys: dict | None) -> dict:
    """Two prompts, longer than level 2's budget and not."""
    import torch

    geometry = GEOMETRIES["smoke"]
    if keys is not None:
        draft = draft_of(geometry).write(args.work / "models" / "smoke-draft")
        keys = {**keys, "model": draft}
    llm = make_engine(
        geometry.write(args.work / "models" / "smoke"),
        args,
        keys,
        load_format="dummy",
        dtype="bfloat16",
        # Little of everything that start-up spends time on: graphs, blocks, tables.
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=1024,
        gpu_memory_utilization=0.2,
        enforce_eager=mode == "eager",
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, geometry.vocab, (n,), generator=draw).tolist() for n in (700, 100)]
    decoded = decode(llm, prompts, NUM_TOKENS)
    found: dict = {"token_ids": decoded.token_ids, "step_ms": _step_ms(decoded)}
    if decoded.counters is not None:
        found["counters"] = decoded.counters.to_dict()
    if keys is not None and "adaptive" not in keys:
        found["measured"] = measured_passes(llm)
    del llm
    release_memory()
    return found


def _step_ms(decoded) -> float:
    return 1e3 * decoded.seconds / decoded.num_steps


if __name__ == "__main__":
    main()
