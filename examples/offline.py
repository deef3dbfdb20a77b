"""Continue one long prompt offline with TriForce, greedily and sampled.

python examples/offline.py
python examples/offline.py --target MODEL --draft DRAFT --dtype auto --prompt FILE
python examples/offline.py --draft ''       # level 1 is prompt lookup: no second model
"""

import argparse
import json
import os
from pathlib import Path

# GiB of KV cache on a CPU; ignored on a GPU.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

from vllm_triforce.metrics.report import counters_of, summary

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=str(HERE / "models" / "target"))
    parser.add_argument("--draft", default=str(HERE / "models" / "draft"), help="'' for none")
    parser.add_argument("--prompt", type=Path, default=HERE / "prompts" / "held_out.txt")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the prompt")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--budget", type=int, default=1024, help="retrieval_budget, tokens")
    parser.add_argument("--keys", type=json.loads, default={}, help="further TriForce keys, JSON")
    parser.add_argument("--dtype", default="float32", help="'auto' is the model's own")
    parser.add_argument("--eager", action="store_true", help="do not compile the models")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    speculative_config = {"method": "triforce", "retrieval_budget": args.budget, **args.keys}
    if args.draft:
        speculative_config["model"] = args.draft
    llm = LLM(
        model=args.target,
        speculative_config=speculative_config,
        dtype=args.dtype,
        max_model_len=args.context + args.max_tokens,
        enforce_eager=args.eager,
    )
    prompt = llm.get_tokenizer()(args.prompt.read_text())["input_ids"][: args.context]
    sampling_params = [
        SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=args.max_tokens, ignore_eos=True),
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * 2, sampling_params)

    for params, output in zip(sampling_params, outputs):
        print("-" * 60)
        print(f"temperature {params.temperature}, after {len(output.prompt_token_ids)} tokens:")
        print(output.outputs[0].text)
    print("-" * 60)
    print(summary(counters_of(llm)))


if __name__ == "__main__":
    main(parse_args())
