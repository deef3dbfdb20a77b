"""Engines and decoding for the steps: public vLLM, and ``collective_rpc`` for what is ours."""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_triforce_bench.gpu_suite.items import Harmless

# One process for everything; set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Whole decode passes are captured as they are: nothing is left to torch.compile.
WITHOUT_COMPILING = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


class EndedEarly(Harmless):
    """Some request was done before the last had begun."""


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """With what every step takes."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="as vLLM names it; left out: vLLM's choice")
    parser.add_argument(
        "--no-compile", action="store_true", help="CUDA graphs of decode passes, no torch.compile"
    )
    parser.add_argument("--work", type=Path, required=True, help="for models")
    parser.add_argument("--result", type=Path, required=True)
    return parser


def make_engine(model: str, args: argparse.Namespace, triforce: dict | None = None, **arguments):
    """vLLM with its own defaults (CUDA graphs, compilation), or small and eager on the CPU.

    Args:
        args: of ``argument_parser()``.
        triforce: TriForce's keys; None is stock vLLM.
        arguments: vLLM's. On the CPU those that say how much memory, which backend and which
            graphs are left out.
    """
    from vllm import LLM

    defaults: dict = {"distributed_executor_backend": "uni", "skip_tokenizer_init": True}
    if args.backend:
        arguments["attention_backend"] = args.backend
    if args.no_compile and not arguments.get("enforce_eager"):
        arguments["compilation_config"] = WITHOUT_COMPILING
    if args.device == "cpu":
        for name in ("attention_backend", "compilation_config", "gpu_memory_utilization"):
            arguments.pop(name, None)
        # Said, not found out: what earlier engines of the process hold would count as taken.
        defaults |= {"kv_cache_memory_bytes": 384 << 20, "block_size": 32}
        arguments |= {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.1}
    if triforce is not None:
        triforce = {"method": "triforce", **triforce}
    return LLM(model, speculative_config=triforce, **{**defaults, **arguments})


@dataclass
class Decoded:
    """What came after the last prompt of a batch was read."""

    token_ids: list[list[int]]  # per request, all of it
    best: list[list[list[tuple[int, float]]]]  # per request and token, best first, if asked for
    num_tokens: int  # of the timed stretch, all requests
    num_steps: int
    seconds: float
    counters: Any  # LevelCounters of the timed stretch; None of stock vLLM


def decode(
    llm, prompts: list[list[int]], num_tokens: int, most_steps: int | None = None, **params
) -> Decoded:
    """Decodes a batch together and times it from when every request has begun to emit.

    Args:
        num_tokens: of each request, at most.
        most_steps: so many are timed, and then the requests are aborted; None is until the first
            is done, and then they all go on to their ends.

    Raises:
        EndedEarly: some request was done before the last had begun; ask for more tokens.
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
    best: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in names}

    def step() -> tuple[int, bool]:
        """How many tokens came, and whether a request is done."""
        count, is_finished = 0, False
        for output in engine.step():
            new = output.outputs[0]
            token_ids[output.request_id] += new.token_ids
            best[output.request_id] += [_best(each) for each in new.logprobs or ()]
            count += len(new.token_ids)
            is_finished |= output.finished
        return count, is_finished

    begun, timed, num_steps, before, is_finished = 0.0, 0, 0, None, False
    # Once one is done, the batch is smaller.
    while engine.has_unfinished_requests() and not is_finished and num_steps != most_steps:
        count, is_finished = step()
        ended = time.perf_counter()
        if begun:
            timed += count
            num_steps += 1
        elif not is_finished and all(token_ids.values()):
            before = _counters(llm)
            begun = time.perf_counter()
    after = _counters(llm)
    if most_steps is not None or not num_steps:
        engine.abort_request(names)
    while engine.has_unfinished_requests():
        step()
    if not num_steps:
        raise EndedEarly(
            f"{num_tokens} tokens of a request were over before all {len(prompts)} decoded "
            "together; ask for more with --num-tokens"
        )
    counters = after.since(before) if before is not None else None
    seconds = ended - begun
    by_request = [token_ids[name] for name in names], [best[name] for name in names]
    return Decoded(*by_request, timed, num_steps, seconds, counters)


def _best(logprobs) -> list[tuple[int, float]]:
    found = [(token, entry.logprob) for token, entry in logprobs.items()]
    return sorted(found, key=lambda item: -item[1])


def synchronized_times(llm) -> bool:
    """Asks the worker to wait for the device around each part of ``propose()``, so that parts
    can be timed; False where it cannot (the sum over parts is right either way)."""
    try:
        llm.collective_rpc("triforce_synchronize_times", args=(True,))
    except (AttributeError, NotImplementedError):
        return False
    return True


def measured_passes(llm, anew: bool = False) -> dict:
    """What TriForce measured passes to take (``vllm_triforce.controller.measurements``), seconds.

    Args:
        anew: measures them now, on an engine without requests; else what start-up found.
    """
    began = time.perf_counter()
    (found,) = llm.collective_rpc("triforce_measured", args=(anew,))
    is_v2 = llm.llm_engine.vllm_config.use_v2_model_runner
    if found is None:
        raise Harmless("nothing was measured at start-up: nothing is chosen by it")
    took = {"took_s": time.perf_counter() - began} if anew else {}
    return {"runner": "v2" if is_v2 else "v1", **took, **found}


def _counters(llm):
    from vllm_triforce.metrics.report import counters_of

    try:
        return counters_of(llm)
    except ValueError:
        return None
