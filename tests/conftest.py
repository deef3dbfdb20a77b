"""Engines shared between tests: starting one costs seconds, so each is made once."""

import os

# Everything in one process; must be set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What level 3 is told of drafts is checked in every test, and a fault ends the engine.
os.environ.setdefault("VLLM_TRIFORCE_CHECK", "raise")

import gc

import pytest

from tests.models import PAIR, make_llama
from tests.one_process import allow_many_engines, end_process_groups, inspect_models_here

ENGINE = dict(
    dtype="float32",
    distributed_executor_backend="uni",
    gpu_memory_utilization=0.1,
    kv_cache_memory_bytes=384 << 20,  # 24,576 tokens of the pair; clearing a GiB takes seconds
    enforce_eager=True,
    max_num_seqs=8,
    block_size=32,
)


@pytest.fixture(scope="session")
def pair() -> dict[str, str]:
    """Return the embedded target/draft pair (MHA)."""
    return {"target": str(PAIR / "target"), "draft": str(PAIR / "draft")}


@pytest.fixture(scope="session")
def gqa_pair(tmp_path_factory) -> dict[str, str]:
    """Make a random target with four query heads to a KV head, and a random draft."""
    folder = tmp_path_factory.mktemp("gqa")
    target = make_llama(folder / "target", num_heads=8, num_kv_heads=2, std=0.05, query_scale=4)
    draft = make_llama(
        folder / "draft", num_layers=1, num_kv_heads=4, seed=1, max_position_embeddings=1024
    )
    return {"target": target, "draft": draft}


def pytest_collection_modifyitems(items) -> None:
    """Run files with slow tests first, so that all processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


class Engines:
    """Keep at most ``keep`` live engines, by their arguments; the oldest gives way."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._live: dict[str, object] = {}

    def clear(self) -> None:
        """End all live engines, and then vLLM's process groups."""
        self._live.clear()
        gc.collect()
        end_process_groups()

    def get(self, model: str, speculative_config: dict | None = None, **kwargs):
        from vllm import LLM

        key = repr((model, speculative_config, sorted(kwargs.items())))
        if key not in self._live:
            allow_many_engines()
            while len(self._live) >= self._keep:
                self._live.pop(next(iter(self._live)))
                gc.collect()
            arguments = {**ENGINE, "max_model_len": 10240, **kwargs}
            if model != str(PAIR / "target"):
                arguments.setdefault("skip_tokenizer_init", True)
            self._live[key] = LLM(model, speculative_config=speculative_config, **arguments)
        self._live[key] = self._live.pop(key)  # most recently used
        return self._live[key]


@pytest.fixture(scope="session", autouse=True)
def short_calibration():
    """Measure passes for a second, and not for ten, at the start of each engine that adapts."""
    from vllm_triforce.runner_v1 import calibration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_MAX_SECONDS", 1.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def models_inspected_here():
    inspect_models_here()


@pytest.fixture(scope="session")
def engines():
    return Engines()


def triforce(**keys) -> dict:
    """Return a config that speculates on everything by fixed lengths, independent of times."""
    return {"method": "triforce", "min_context": 0, "adaptive": False, **keys}


@pytest.fixture(scope="module")
def ranks_without_compiler():
    """Leave the ranks of log-probabilities uncompiled: compiling takes 20 s."""
    from vllm.v1.sample import sampler

    with pytest.MonkeyPatch.context() as patch:
        compiled = sampler.batched_count_greater_than
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        patch.setattr(sampler, "batched_count_greater_than", plain)
        yield
