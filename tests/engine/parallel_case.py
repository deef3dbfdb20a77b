"""Runs TriForce over two ranks or two engines through AsyncLLM and prints what it saw as JSON.

``python -m tests.engine.parallel_case CASE``; "ray" is two tensor-parallel ranks that are Ray's
actors, see tests/engine/ray_on_cpu, and needs ``pip install ray``. Host memory is Runner V2's: its
cases need ``v2_environment()``.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.child import say
from tests.conftest import ENGINE, triforce
from tests.models import PAIR, held_out_tokens

DRAFT = {"model": str(PAIR / "draft"), "retrieval_budget": 256}
KEYS = {
    **dict.fromkeys(("tensor", "data", "ray"), triforce(**DRAFT)),
    "copy": triforce(**DRAFT, level2_model="bfloat16"),
    # By the controller, whose ranks must decide alike.
    "chosen": {"method": "triforce", **DRAFT, "adaptive": True},
    "suffix": {"method": "triforce", **DRAFT, "draft_sources": "suffix,draft_model"},
    "host memory": triforce(**DRAFT, kv_offload_gib=0.06),
    "host memory, plain": {"method": "triforce", "levels": "3", "kv_offload_gib": 0.06},
}
IN_HOST_MEMORY = ("host memory", "host memory, plain")
# In Triton's interpreter, where a token takes a second.
SMALL = dict(max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=64 << 20)


def prompts() -> list[list[int]]:
    text = held_out_tokens(4000)
    return [text[:900], text[1000:1700], text[2000:2400], text[300:800]]


async def answers(engine, case: str) -> list[list[int]]:
    from vllm import SamplingParams

    max_tokens = 14 if case in IN_HOST_MEMORY else 30
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    # Triton's interpreter cannot run the kernel for top-k and top-p.
    top_p = 1.0 if case in IN_HOST_MEMORY else 0.9
    sampled = SamplingParams(temperature=0.9, top_p=top_p, max_tokens=max_tokens)

    async def one(name, prompt, params):
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            last = output
        return list(last.outputs[0].token_ids)

    # Sampled requests beside the greedy ones: the ranks' noise must be the same too.
    tasks = [one(f"greedy {i}", prompt, greedy) for i, prompt in enumerate(prompts())]
    tasks += [one(f"sampled {i}", prompt, sampled) for i, prompt in enumerate(prompts())]
    return (await asyncio.gather(*tasks))[: len(prompts())]


def counters_by_engine() -> list[dict[str, float]]:
    """Level 2's, from Prometheus: a remote call answers for the first engine only."""
    from prometheus_client import REGISTRY

    names = {
        "vllm:triforce_level2_draft_tokens_total": "num_level2_drafted",
        "vllm:triforce_level2_accepted_tokens_total": "num_level2_accepted",
    }
    found: dict[str, dict[str, float]] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in names:
                engine = found.setdefault(sample.labels["engine"], {})
                engine[names[sample.name]] = sample.value
    return [found[engine] for engine in sorted(found)]


def use_ray_on_the_cpu() -> None:
    """Two of what vLLM asks Ray for, and a platform that asks for it, here and in all children."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
    paths = [str(Path(__file__).parent / "ray_on_cpu"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"GPU": 2, "CPU": 2})
    os.environ["RAY_AUTH_MODE"] = "disabled"


async def main(case: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    kind = "data" if case == "data" else "tensor"
    arguments = {**ENGINE, "max_model_len": 4096, f"{kind}_parallel_size": 2}
    arguments |= SMALL if case in IN_HOST_MEMORY else {}
    arguments["distributed_executor_backend"] = "ray" if case == "ray" else "mp"
    if case == "ray":
        use_ray_on_the_cpu()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(str(PAIR / "target"), speculative_config=KEYS[case], **arguments)
    )
    try:
        tokens = await answers(engine, case)
        counters = (
            counters_by_engine()
            if case == "data"
            else await engine.collective_rpc("triforce_counters")
        )
    finally:
        engine.shutdown()
    say({"tokens": tokens, "counters": counters})


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    # vLLM's binding wants a NUMA node for each worker.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    asyncio.run(main(sys.argv[1]))
