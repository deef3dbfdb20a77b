"""Engines of one process, alive side by side, so that methods can be interleaved."""

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import psutil
import torch
from vllm.entrypoints.llm import LLM
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_triforce.config.keys import METHOD
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import ModelFacts, engine_arguments, kv_cache_bytes
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.options import BadInput

# Memory of an engine beside weights and KV cache: buffers and compiled code (0.3 to 0.5 GiB for the
# embedded pair on the CPU), and activations of a larger model.
OVERHEAD_BYTES = 1 << 30
# Share of the free memory that engines may take.
SHARE_OF_FREE_MEMORY = 0.7


class SpeculationRecorder(StatLoggerBase):
    """Statistics of one engine; vLLM's Prometheus metrics belong to a process's last engine."""

    def __init__(self, vllm_config=None, engine_index: int = 0) -> None:
        self.stats: list[Any] = []
        """vLLM's ``SpecDecodingStats`` of each step."""

    def record(
        self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0
    ) -> None:
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is not None:
            self.stats.append(stats)

    def sums(self) -> dict[str, Any]:
        """Sum the steps; ``num_drafts`` counts requests that verified a proposal."""
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        by_position = (each.num_accepted_tokens_per_pos for each in self.stats)
        return {
            **{name: sum(getattr(each, name) for each in self.stats) for name in names},
            "num_accepted_tokens_per_pos": list(map(sum, zip_longest(*by_position, fillvalue=0))),
        }

    def log_engine_initialized(self) -> None:
        pass


@dataclass
class Engine:
    """A running engine of one method.

    Args:
        memory_bytes: growth of the process while the engine was made (CPU), or bytes that the
            device allocated (GPU).
    """

    variant: Variant
    llm: LLM
    recorder: SpeculationRecorder
    memory_bytes: int

    def levels(self) -> LevelCounters | None:
        return counters_of(self.llm) if self.variant.is_triforce else None

    @contextmanager
    def waiting_for_the_device(self):
        """Let each part of a proposal wait for the device: times of launches become its own."""
        self.llm.collective_rpc("triforce_synchronize_times", args=(True,))
        try:
            yield
        finally:
            self.llm.collective_rpc("triforce_synchronize_times", args=(False,))


def start(
    settings: Settings, dtype: str, variant: Variant, target: ModelFacts, draft: ModelFacts | None
) -> Engine:
    """Start an engine that differs from stock vLLM's in ``speculative_config`` alone."""
    arguments = {
        "enable_prefix_caching": True,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        **engine_arguments(settings, dtype, variant, target, draft),
    }
    fix_kernel_rebinding()
    before = _memory_bytes()
    llm = LLM(
        settings.target,
        speculative_config=None if variant.keys is None else dict(variant.keys),
        **arguments,
    )
    if variant.is_triforce:
        _check_budget(variant, llm.llm_engine.vllm_config)
    recorder = SpeculationRecorder()
    loggers: Any = llm.llm_engine.logger_manager
    loggers.stat_loggers.append(recorder)
    return Engine(variant, llm, recorder, max(0, _memory_bytes() - before))


def _check_budget(variant: Variant, vllm_config) -> None:
    """Raise BadInput if TriForce rounded the budget up to vLLM's KV block."""
    budget = vllm_config.additional_config[METHOD]["retrieval_budget"]
    if variant.budget not in (None, budget):
        raise BadInput(
            f"--budgets: {variant.budget} does not fit vLLM's KV block of "
            f"{vllm_config.cache_config.block_size} tokens; use {budget}, or a smaller block "
            "(--engine '{\"block_size\": 32}')"
        )


def end(engines: list[Engine]) -> None:
    """Free the engines.

    Make the next engine before any other takes a step: vLLM's process groups end with an engine.
    """
    engines.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fit_at_once(settings: Settings, target: ModelFacts, draft: ModelFacts | None) -> int:
    """Number of engines that fit into the free memory, at least 2."""
    if settings.engines_at_once is not None:
        return settings.engines_at_once
    models = [target] if draft is None else [target, draft]
    weights = 2 * sum(model.weights_bytes for model in models)
    kv_cache = max(kv_cache_bytes(settings, dtype, *models) for dtype in settings.dtypes)
    free = psutil.virtual_memory().available
    if not current_platform.is_cpu():
        free = torch.cuda.mem_get_info()[0]
    return max(2, int(SHARE_OF_FREE_MEMORY * free / (weights + kv_cache + OVERHEAD_BYTES)))


def _memory_bytes() -> int:
    if current_platform.is_cpu():
        return psutil.Process().memory_info().rss
    return torch.cuda.memory_allocated()


class DevicePeak:
    """Growth of a GPU's allocated memory in a run; 0 on the CPU."""

    def __init__(self) -> None:
        self._has_gpu = torch.cuda.is_available()
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def growth_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before if self._has_gpu else 0
