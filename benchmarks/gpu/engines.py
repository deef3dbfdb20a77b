"""Engines of the checks: vLLM as it serves, or small and eager on a CPU."""

import gc
import os
from typing import Any

# One process for everything; set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# Engines follow one another in a process: memory that an earlier one still holds must leave room.
_MEMORY = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
# Graphs of whole decode passes, without torch.compile.
GRAPHS_ONLY = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}


def make_engine(
    model: str, triforce: dict | None, is_small: bool, backend: str | None = None, **arguments: Any
):
    """Start an engine.

    Args:
        triforce: TriForce's keys; None for stock vLLM.
        is_small: leave out torch.compile and kernels that the emulated GPU is too slow for.
        backend: vLLM's name of an attention backend; None for vLLM's choice.
        arguments: vLLM's.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    arguments = {"distributed_executor_backend": "uni", **_MEMORY, **arguments}
    if backend is not None:
        arguments["attention_backend"] = backend
    if is_small:
        leave_out_mask_kernel()
        if not arguments.get("enforce_eager"):
            arguments["compilation_config"] = GRAPHS_ONLY
    if current_platform.is_cpu():
        arguments.pop("attention_backend", None)
        arguments.pop("compilation_config", None)
        arguments |= {"dtype": "float32", "enforce_eager": True, "block_size": 32}
        arguments["kv_cache_memory_bytes"] = 384 << 20
    config = None if triforce is None else {"method": "triforce", **triforce}
    return LLM(model, speculative_config=config, skip_tokenizer_init=True, **arguments)


def leave_out_mask_kernel() -> None:
    """Let PyTorch mask by top-k and top-p: Triton's interpreter cannot run vLLM's kernel."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


def decode(llm, prompts: list[list[int]], num_tokens: int, **params: Any) -> list[Any]:
    """Decode a batch past any end of sequence; returns vLLM's outputs, one for each request."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, detokenize=False, **{"temperature": 0.0, **params}
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def release(llm) -> None:
    """Free an engine's memory; the caller's name must be its last."""
    import torch

    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
