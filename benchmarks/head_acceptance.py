"""Acceptance of an EAGLE-3 head by context: TriForce's level 1 beside stock vLLM's `eagle3`.

    python benchmarks/head_acceptance.py build/smollm2/gqa examples/models/smollm2_head \
        --contexts 512,2048,4096,7500 --text FILE [--engine stock|windowed|triforce]

Each engine drafts three tokens in every step, straight to the full pass. `windowed` is stock vLLM
with a sliding window of 512 tokens in a copy of the head's config. All contexts of a stretch end at
the same place of the text, so greedy answers differ only by what lies far back. On a CPU vLLM's
test of sampled drafts is wrong (patches/README.md); it is mended here for all engines.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

_NUM_DRAFTS = 3
_WINDOW = 512


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--engine", default="triforce", choices=("stock", "windowed", "triforce"))
    parser.add_argument("--contexts", default="512,2048,4096,7500", help="tokens")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    return parser.parse_args()


def windowed_copy(head: str, folder: str) -> str:
    """Copy a head, with a sliding window in its config."""
    copy = Path(folder) / "head"
    shutil.copytree(head, copy)
    config = json.loads((copy / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    config["sliding_window"] = _WINDOW
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def start_engine(args: argparse.Namespace, head: str, max_tokens: int):
    from vllm import LLM

    from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel

    config = {"model": head, "num_speculative_tokens": _NUM_DRAFTS}
    if args.engine == "triforce":
        fixed = {"draft_sources": "head", "levels": "1,3", "adaptive": False, "min_context": 0}
        config |= {"method": "triforce", **fixed}
    else:
        config |= {"method": "eagle3", "draft_sample_method": "probabilistic"}
    llm = LLM(
        args.target,
        dtype="float32",
        max_model_len=max_tokens,
        max_num_seqs=2,
        enforce_eager=True,
        kv_cache_memory_bytes=4 << 30,
        disable_log_stats=False,
        speculative_config=config,
    )
    fix_expand_kernel()
    return llm


def counts(llm) -> list[int]:
    """Return the number of drafts, and of accepted tokens at each place of a draft."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [metrics["vllm:spec_decode_num_drafts"].value, *accepted]


def main() -> None:
    args = parse_args()
    from vllm import SamplingParams

    contexts = [int(context) for context in args.contexts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        head = windowed_copy(args.head, folder) if args.engine == "windowed" else args.head
        llm = start_engine(args, head, max(contexts) + args.tokens + 64)
    text = llm.get_tokenizer()(args.text.read_text(), add_special_tokens=False)["input_ids"]
    ends = [len(text) * (2 * k + 3) // (2 * args.stretches + 2) for k in range(args.stretches)]
    if ends[0] < max(contexts):
        sys.exit(f"{args.text} is too short: its first stretch ends after {ends[0]} tokens")
    print("context  T  drafts  accepted after all before it, by place  tokens a full pass")
    for context in contexts:
        for temperature in map(float, args.temperatures.split(",")):
            params = SamplingParams(
                temperature=temperature, max_tokens=args.tokens, ignore_eos=True
            )
            before = counts(llm)
            for end in ends:
                prompt = {"prompt_token_ids": text[end - context : end]}
                llm.generate([prompt], params, use_tqdm=False)
            num_drafts, *accepted = (a - b for a, b in zip(counts(llm), before))
            rates = [n / max(1, m) for n, m in zip(accepted, [num_drafts, *accepted])]
            shown = ", ".join(f"{rate:.2f}" for rate in rates)
            length = 1 + sum(accepted) / max(1, num_drafts)
            print(f"{context}  {temperature:g}  {num_drafts}  {shown}  {length:.2f}", flush=True)


if __name__ == "__main__":
    main()
