"""Run one case, in a process of its own, under the emulation or on a GPU:

python [-m emu] -m tests.emulated_gpu.run_case CASE.json RESULT.json
"""

import dataclasses
import gc
import json
import sys
from collections import Counter
from pathlib import Path

from tests.emulated_gpu.cases import Case
from tests.emulated_gpu.requests import MIN_CONTEXT, REQUESTS
from vllm_triforce.config.draft_sources import HEAD_SOURCE

IS_EMULATED = "emu" in sys.modules

ENGINE = dict(
    skip_tokenizer_init=True,
    disable_log_stats=False,  # counters go the way of every server
    block_size=16,
    max_model_len=256,
    max_num_batched_tokens=256,
    max_num_seqs=4,
    num_gpu_blocks_override=96,
    gpu_memory_utilization=0.1,
    distributed_executor_backend="uni",
    seed=0,
)
# Whole decode passes, not compiled: what is captured is what the models launch.
GRAPHS = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8, 20])
TRIFORCE = dict(
    method="triforce",
    adaptive=False,
    num_speculative_tokens=4,
    gamma=2,
    min_context=MIN_CONTEXT,
    retrieval_budget=64,
    num_sink_tokens=4,
    num_recent_tokens=40,
)


def make_engine(case: Case, target: str, draft: str, head: str):
    from vllm import LLM
    from vllm.v1.sample.ops import topk_topp_sampler

    gc.collect()
    gc.freeze()  # vLLM collects often, and what was imported never goes
    if IS_EMULATED:
        # vLLM's kernel for top-k and top-p takes minutes in the interpreter; PyTorch's is exact.
        topk_topp_sampler.HAS_TRITON = False
    triforce = None
    if case.source:
        triforce = TRIFORCE | {"draft_sources": case.source}
        if case.selection:
            triforce["selection"] = case.selection
        else:  # level 2 takes no part
            del triforce["retrieval_budget"]
        if case.source == HEAD_SOURCE:
            del triforce["num_sink_tokens"]
        if case.has_draft:
            triforce["model"] = head if case.source == HEAD_SOURCE else draft
    if case.plan == "plain":
        triforce = {"method": "triforce", "levels": "3"}
    if case.offload:
        triforce |= {"kv_offload_gib": 0.01}
        if case.source:  # vLLM's warm-up requests propose too, which must not be counted
            triforce |= {"min_context": 0}
    if case.copies:
        triforce |= {"level2_model": "bfloat16"}
    if case.reads_all:
        triforce |= {"retrieval_budget": ENGINE["max_model_len"]}
    if case.is_single:
        triforce |= {"max_speculating_seqs": 1}
    llm = LLM(
        target,
        dtype=case.dtype,
        attention_backend=case.backend,
        speculative_config=triforce,
        enforce_eager=not case.graphs,
        **({"compilation_config": GRAPHS} if case.graphs else {}),
        # FlashInfer's kernels for prompts are not part of the emulation.
        **({"gdn_prefill_backend": "triton"} if case.target == "qwen3.5" else {}),
        enable_prefix_caching=case.cached,
        # Without a profile of the memory, which others beside it would disturb.
        **({} if IS_EMULATED else {"kv_cache_memory_bytes": 256 << 20}),
        **ENGINE,
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert any("v1.worker.gpu." in base.__module__ for base in type(runner).__mro__), (
        f"{type(runner)} is not Model Runner V2"
    )
    if case.plan == "dice":
        _plan_by_dice(llm, runner.speculator)
    return llm


def _plan_by_dice(llm, speculator) -> None:
    from tests.parity.dice import Dice
    from vllm_triforce.core.messages import StepPlan

    dice = Dice(speculator, seed=5)
    numbers = iter(range(1 << 30))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.plan_step = lambda able, *_: StepPlan(next(numbers), dice.proposing(able))


def _count_calls(owner: type, method: str, name_of) -> Counter:
    """Count the calls of a method from here on, by ``name_of`` its object."""
    counted, original = Counter(), getattr(owner, method)

    def count(its, *args, **kwargs):
        counted[name_of(its)] += 1
        return original(its, *args, **kwargs)

    setattr(owner, method, count)
    return counted


def _record_steps() -> list[list[str]]:
    """Record the kernels that the proposals of each step launch outside graphs."""
    from emu.graphs import Graph, Recorder

    from vllm_triforce.runner_v2.runner import RunnerAdapterV2

    steps, propose = [], RunnerAdapterV2.propose

    def recording(*args, **kwargs):
        launched = Graph()
        with Recorder(launched):
            draft_tokens = propose(*args, **kwargs)
        steps.append(launched.kernels)
        return draft_tokens

    RunnerAdapterV2.propose = recording
    return steps


def _count_launches(llm, steps: list[list[str]]) -> dict[str, int]:
    """Count the launches of one of level 2's layers, and of a step's proposals outside graphs."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    launches = {}
    for may_select, passes in runner.speculator.built.speculator.level2._passes.items():
        part = "layer that selects" if may_select else "layer"
        for graph in passes._graphs.graphs.values():
            # From a layer's attention to the next layer's.
            attention = [i for i, name in enumerate(graph.kernels) if name == "_vllm_fa3_C::fwd"]
            launches[part] = attention[1] - attention[0]
    # Steps with new requests have more, as those rebuild the windows of level 1's model.
    launches["step"] = max(len(kernels) for kernels in steps if "aten::embedding" not in kernels)
    return launches


def run(case: Case, target: str, draft: str, head: str) -> dict:
    from vllm import SamplingParams

    from vllm_triforce.runner_v2.passes import GraphedRound

    llm = make_engine(case, target, draft, head)
    prompts = [{"prompt_token_ids": request.prompt} for request in REQUESTS]
    if case.cached:
        llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    counts_launches = IS_EMULATED and case.counts_launches
    steps = _record_steps() if counts_launches else []
    # From here on: trials at start replay some.
    rounds = _count_calls(GraphedRound, "replay", lambda round_: round_.name)
    outputs = llm.generate(
        prompts,
        [
            SamplingParams(
                **request.params,
                max_tokens=request.max_tokens(case.num_tokens),
                ignore_eos=True,
                detokenize=False,
            )
            for request in REQUESTS
        ],
        use_tqdm=False,
    )
    counters = {}
    if case.plan:
        from vllm_triforce.metrics.report import counters_of

        counters = dataclasses.asdict(counters_of(llm))
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_cached": [output.num_cached_tokens for output in outputs],
        "replayed_rounds": dict(rounds),
        "counters": {name: n for name, n in counters.items() if isinstance(n, int)},
        "launches": _count_launches(llm, steps) if counts_launches else {},
    }


def main() -> None:
    asked, result = map(Path, sys.argv[1:])
    task = json.loads(asked.read_text())
    task["case"] = Case(**task["case"])
    if IS_EMULATED:
        from emu import graphs
        from emu.report import report

        found = run(**task)
        failed = {name: report.kernels[name].compile_errors[0] for name in report.failed}
        found |= {"not_compiled": failed, "graphs": [graphs.num_captured, graphs.num_replayed]}
    else:
        import torch

        graph = torch.cuda.CUDAGraph
        counted = [_count_calls(graph, name, id) for name in ("capture_end", "replay")]
        found = run(**task) | {"not_compiled": {}}
        found["graphs"] = [calls.total() for calls in counted]
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
