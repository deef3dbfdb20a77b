"""Runs TriForce over two ranks or two engines through AsyncLLM and prints what it saw as JSON.

``python -m tests.engine.parallel_case tensor|copy|chosen|data|ray``; ray is two tensor-parallel
ranks that are Ray's actors, see tests/engine/ray_on_cpu, and needs ``pip install ray``.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
# vLLM's binding wants a NUMA node for each worker.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from tests.child import say
from tests.conftest import ENGINE, triforce
from tests.models import PAIR, held_out_tokens


async def answers(engine, prompts) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=30)

    async def one(name, prompt, params):
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            last = output
        return list(last.outputs[0].token_ids)

    # Sampled requests beside the greedy ones: the ranks' noise must be the same too.
    tasks = [one(f"greedy {i}", prompt, greedy) for i, prompt in enumerate(prompts)]
    tasks += [one(f"sampled {i}", prompt, sampled) for i, prompt in enumerate(prompts)]
    return (await asyncio.gather(*tasks))[: len(prompts)]


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

    text = held_out_tokens(4000)
    prompts = [text[:900], text[1000:1700], text[2000:2400], text[300:800]]
    kind = "data" if case == "data" else "tensor"
    arguments = {**ENGINE, "max_model_len": 4096, f"{kind}_parallel_size": 2}
    arguments["distributed_executor_backend"] = "mp"
    if case == "ray":
        use_ray_on_the_cpu()
        arguments["distributed_executor_backend"] = "ray"
    keys = triforce(model=str(PAIR / "draft"), retrieval_budget=256)
    if case == "copy":
        keys["level2_model"] = "bfloat16"
    if case == "chosen":  # by the controller, whose ranks must decide alike
        keys = {**keys, "adaptive": True}
        del keys["min_context"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(str(PAIR / "target"), speculative_config=keys, **arguments)
    )
    try:
        tokens = await answers(engine, prompts)
        counters = (
            counters_by_engine()
            if case == "data"
            else await engine.collective_rpc("triforce_counters")
        )
    finally:
        engine.shutdown()
    say({"tokens": tokens, "counters": counters})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
