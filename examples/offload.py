"""Continue a context beyond the GPU's memory, with KV in host memory (docs/offload.md).

    python examples/offload.py --target MODEL --draft DRAFT --prompt FILE --gib 16

It needs a GPU, where vLLM's Model Runner V2 is the default. This script has run under Triton's
interpreter only; tests of the same engines ran on an H200.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=str(HERE / "models" / "target"))
    parser.add_argument("--draft", default=str(HERE / "models" / "draft"), help="'' for none")
    parser.add_argument("--prompt", type=Path, default=HERE / "prompts" / "held_out.txt")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--budget", type=int, default=1024, help="retrieval_budget, tokens")
    parser.add_argument("--keys", type=json.loads, default={}, help="further TriForce keys, JSON")
    parser.add_argument("--gib", type=float, default=1.0, help="host memory of each rank, GiB")
    parser.add_argument(
        "--device-gib", type=float, help="KV cache on the GPU, GiB; default: vLLM's"
    )
    parser.add_argument("--block-size", type=int, help="tokens in a KV block; default: vLLM's")
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture graphs")
    return parser.parse_args()


def start_engine(args: argparse.Namespace):
    from vllm import LLM

    speculative_config = {"method": "triforce", "kv_offload_gib": args.gib}
    if args.plain:
        speculative_config["levels"] = "3"
    else:
        speculative_config["retrieval_budget"] = args.budget
        if args.draft:
            speculative_config["model"] = args.draft
    speculative_config |= args.keys
    engine_args = {}
    if args.device_gib:
        engine_args["kv_cache_memory_bytes"] = int(args.device_gib * (1 << 30))
    try:
        return LLM(
            model=args.target,
            speculative_config=speculative_config,
            dtype=args.dtype,
            max_model_len=args.context + args.max_tokens,
            max_num_seqs=2,
            block_size=args.block_size,
            enforce_eager=args.eager,
            **engine_args,
        )
    except ValueError as error:  # settings are checked before weights load
        sys.exit(f"This cannot run here.\n{error}")


def main(args: argparse.Namespace) -> None:
    from vllm import SamplingParams

    from vllm_triforce.metrics.report import counters_of, summary

    llm = start_engine(args)
    prompt = llm.get_tokenizer()(args.prompt.read_text())["input_ids"][: args.context]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": prompt}], params)[0]
    print(output.outputs[0].text)

    counters = counters_of(llm)
    print(summary(counters))
    print(f"Read from host memory by full passes: {counters.num_staged_bytes / 1e9:.3f} GB")
    if counters.num_pool_blocks:
        share = counters.num_pool_hits / counters.num_pool_blocks
        print(f"Already on the device, of the blocks read by level 2: {100 * share:.1f}%")


if __name__ == "__main__":
    main(parse_args())
