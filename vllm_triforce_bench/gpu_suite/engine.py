"""Engines and decoding for the steps: public vLLM, and ``collective_rpc`` for our counters."""

import os
import time
from dataclasses import dataclass

# One process for everything; set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_engine(model: str, device: str, triforce: dict | None = None, **arguments):
    """vLLM with its own defaults (CUDA graphs, compilation), or small and eager on the CPU."""
    from vllm import LLM

    defaults: dict = {"distributed_executor_backend": "uni", "skip_tokenizer_init": True}
    if device == "cpu":
        defaults |= {"dtype": "float32", "enforce_eager": True, "block_size": 32}
        defaults |= {"gpu_memory_utilization": 0.1}
        arguments.pop("attention_backend", None)
    if triforce is not None:
        triforce = {"method": "triforce", **triforce}
    return LLM(model, speculative_config=triforce, **{**defaults, **arguments})


@dataclass
class Decoded:
    """What came after the last prompt of a batch was read."""

    token_ids: list[list[int]]  # per request, all of it
    num_tokens: int  # of the timed stretch, all requests
    num_steps: int
    seconds: float
    counters: object | None  # LevelCounters of the timed stretch


def decode(llm, prompts: list[list[int]], num_tokens: int, **params) -> Decoded:
    """Decodes a batch together and times it from when every request has begun to emit.

    Raises:
        RuntimeError: some request was done before the last had begun; ask for more tokens.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **{"temperature": 0.0, **params},
    )
    engine = llm.llm_engine
    names = [f"suite-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    token_ids: dict[str, list[int]] = {name: [] for name in names}
    begun, timed, num_steps, before = 0.0, 0, 0, None
    while engine.has_unfinished_requests():
        finished = False
        for output in engine.step():
            new = output.outputs[0].token_ids
            token_ids[output.request_id] += new
            finished |= output.finished
            timed += len(new) if begun else 0
        ended = time.perf_counter()
        num_steps += begun > 0
        if finished:  # the batch is smaller from now on
            break
        if not begun and all(token_ids.values()):
            before = _counters(llm)
            begun = time.perf_counter()
    if not num_steps:
        raise RuntimeError(f"{num_tokens} tokens are over before all requests decode together")
    after = _counters(llm)
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids[output.request_id] += output.outputs[0].token_ids
    counters = after.since(before) if before is not None else None
    return Decoded([token_ids[name] for name in names], timed, num_steps, ended - begun, counters)


def synchronized_times(llm) -> bool:
    """Asks the worker to wait for the device around each part of ``propose()``, so that parts
    can be timed; False where it cannot (the sum over parts is right either way)."""
    try:
        llm.collective_rpc("triforce_synchronize_times", args=(True,))
    except (AttributeError, NotImplementedError):
        return False
    return True


def _counters(llm):
    from vllm_triforce.metrics.report import counters_of

    try:
        return counters_of(llm)
    except ValueError:
        return None
