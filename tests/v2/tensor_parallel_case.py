"""Runs Model Runner V2 over two ranks, with the KV cache in host memory, and prints what it saw as
JSON. ``python -m tests.v2.tensor_parallel_case ASKED.json``, in ``v2_environment()``."""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
# vLLM's binding wants a NUMA node for each worker.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

from tests.child import say


def main(asked: dict) -> None:
    """
    Args:
        asked: the target's name, TriForce's keys, and requests: prompts with their parameters.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        asked["target"],
        speculative_config=asked["keys"],
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=1024,
        block_size=32,
        skip_tokenizer_init=True,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in asked["requests"]],
        [SamplingParams(**params, detokenize=False) for _, params in asked["requests"]],
        use_tqdm=False,
    )
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": llm.collective_rpc("triforce_counters"),
    }
    say(found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
