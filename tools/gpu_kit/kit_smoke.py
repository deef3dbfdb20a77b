"""Check that vLLM runs on this GPU: generate twice with a random Llama.

python3 -m kit_smoke [--import-only] [--eager] [--backend FLASH_ATTN | TRITON_ATTN] [--v1]
"""

import argparse
import json
import os
import time
from pathlib import Path

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    vocab_size=32000,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--import-only", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--backend", help="default: vLLM's choice")
    parser.add_argument("--v1", action="store_true", help="Model Runner V1")
    parser.add_argument(
        "--dir", type=Path, default=Path("/tmp/tiny-llama"), help="folder of the model's config"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    args = parse()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.v1:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    begin = time.time()
    import torch
    import vllm
    from vllm.platforms import current_platform

    platform = type(current_platform).__name__
    print(
        f"vllm {vllm.__version__}, torch {torch.__version__}, {platform}, imported in "
        f"{time.time() - begin:.1f} s",
        flush=True,
    )
    if not args.import_only:
        generate(args)


def generate(args: argparse.Namespace) -> None:
    # If this library does not load, vLLM only warns and fails later.
    import vllm._C_stable_libtorch  # noqa: F401
    from vllm import LLM, SamplingParams
    from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE, FA3_UNAVAILABLE_REASON

    print("FA3", FA3_AVAILABLE, FA3_UNAVAILABLE_REASON, flush=True)
    args.dir.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"num_hidden_layers": args.layers}
    (args.dir / "config.json").write_text(json.dumps(config))
    begin = time.time()
    llm = LLM(
        model=str(args.dir),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=0.2,
        enforce_eager=args.eager,
        seed=0,
        **({"attention_backend": args.backend} if args.backend else {}),
    )
    print(f"engine started in {time.time() - begin:.1f} s", flush=True)
    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    prompts = [
        {"prompt_token_ids": [1] + [7 * i * (j + 3) % 31000 + 5 for j in range(100 + 50 * i)]}
        for i in range(args.requests)
    ]
    begin = time.time()
    first = llm.generate(prompts, params, use_tqdm=False)
    print(f"generated in {time.time() - begin:.2f} s")
    for output in first:
        completion = output.outputs[0]
        print(len(output.prompt_token_ids), completion.token_ids[:12], completion.finish_reason)
    again = llm.generate(prompts, params, use_tqdm=False)
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(first, again)]
    print("the same tokens again, with the prefix cache:", same)
    print("KIT_SMOKE_OK")


if __name__ == "__main__":
    main()
