"""Engines on Model Runner V2 and what the cases want to see of their insides."""

import os
from contextlib import contextmanager

from tests.inside import worker_of
from tests.one_process import inspect_models_here

# Selection inside level 2's passes takes a second a pass in the interpreter. Cases name it, or all
# have it with TRIFORCE_TEST_REFRESH=0.
REFRESH_INTERVAL = int(os.environ.get("TRIFORCE_TEST_REFRESH", 8))


def make_engine(model: str, triforce: dict | None = None, **arguments):
    """An engine in this process, small enough for Triton's interpreter."""
    from vllm import LLM
    from vllm.v1.sample.ops import topk_topp_sampler

    inspect_models_here()
    # Triton's interpreter cannot run the kernel for top-k and top-p; PyTorch's way is exact too.
    topk_topp_sampler.HAS_TRITON = False
    fixed = {"method": "triforce", "min_context": 0, "adaptive": False}
    keys = triforce and {**fixed, "refresh_interval": REFRESH_INTERVAL, **triforce}
    defaults = dict(
        dtype="float32",
        distributed_executor_backend="uni",
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=128 << 20,
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=1024,
        block_size=32,
        skip_tokenizer_init=True,
    )
    llm = LLM(model, speculative_config=keys or None, **{**defaults, **arguments})
    assert worker_of(llm).use_v2_model_runner
    return llm


def speculator_of(llm):
    return worker_of(llm).model_runner.speculator


@contextmanager
def uninformed_scheduler(llm):
    """The scheduler verifies ``num_speculative_tokens`` of every request, as an asynchronous one
    does, which the CPU cannot have: vLLM's own handler announces that many placeholders."""
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

    runner = worker_of(llm).model_runner
    ours = runner.draft_tokens_handler
    runner.draft_tokens_handler = DraftTokensHandler(runner.device)
    try:
        yield
    finally:
        runner.draft_tokens_handler = ours
