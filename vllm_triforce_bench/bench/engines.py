"""Engines of one process, alive side by side, so that methods can be interleaved."""

import gc
from dataclasses import dataclass, field
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
from vllm_triforce_bench.bench.errors import BadInput
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import ModelFacts, kv_cache_bytes
from vllm_triforce_bench.bench.pass_times import PassTimes
from vllm_triforce_bench.bench.settings import Settings

# Of an engine beside its weights and KV cache: buffers and compiled code (0.3 to 0.5 GiB for the
# embedded pair on the CPU), and room for what a larger model activates.
OVERHEAD_BYTES = 1 << 30
# Of the memory that is free, what engines may take.
SHARE_OF_FREE_MEMORY = 0.7


@dataclass
class SpeculationStats:
    """Sums of vLLM's own ``SpecDecodingStats`` of one engine."""

    num_drafts: int = 0
    """Requests times steps that verified a proposal."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def since(self, earlier: "SpeculationStats") -> "SpeculationStats":
        before = earlier.num_accepted_tokens_per_pos
        before = before + [0] * (len(self.num_accepted_tokens_per_pos) - len(before))
        return SpeculationStats(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            [a - b for a, b in zip(self.num_accepted_tokens_per_pos, before)],
        )


class SpeculationRecorder(StatLoggerBase):
    """One engine's statistics. vLLM's Prometheus metrics belong to the last engine of a process."""

    def __init__(self, vllm_config=None, engine_index: int = 0) -> None:
        self.sums = SpeculationStats()

    def record(
        self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0
    ) -> None:
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is None:
            return
        sums, added = self.sums, stats.num_accepted_tokens_per_pos
        known = sums.num_accepted_tokens_per_pos
        known = known + [0] * (len(added) - len(known))
        self.sums = SpeculationStats(
            sums.num_drafts + stats.num_drafts,
            sums.num_draft_tokens + stats.num_draft_tokens,
            sums.num_accepted_tokens + stats.num_accepted_tokens,
            [a + b for a, b in zip(known, added)],
        )

    def log_engine_initialized(self) -> None:
        pass


@dataclass
class Engine:
    """A running engine of one method."""

    variant: Variant
    llm: LLM
    recorder: SpeculationRecorder
    memory_bytes: int
    """That the process grew by while it was made (CPU), or that the device allocated (GPU)."""
    passes: PassTimes | None = None

    def levels(self) -> LevelCounters | None:
        return counters_of(self.llm) if self.variant.is_triforce else None


def start(
    settings: Settings,
    dtype: str,
    variant: Variant,
    target: ModelFacts,
    draft: ModelFacts | None,
) -> Engine:
    """An engine that differs from stock vLLM's in ``speculative_config`` alone."""
    # TriForce keeps its draft's KV in a small cache of its own.
    shares_cache = draft is not None and variant.method == "draft_model"
    models = (target, draft) if shares_cache else (target,)
    arguments = dict(
        dtype=dtype,
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(settings.batch_sizes),
        gpu_memory_utilization=0.1,  # the KV cache's size is given
        kv_cache_memory_bytes=kv_cache_bytes(settings, dtype, *models),
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        use_tqdm_on_load=False,
    )
    fix_kernel_rebinding()
    before = _memory_bytes()
    llm = LLM(
        settings.target,
        speculative_config=None if variant.keys is None else dict(variant.keys),
        **{**arguments, **settings.engine_keys},
    )
    if variant.is_triforce:
        _check_budget(variant, llm.llm_engine.vllm_config)
    recorder = SpeculationRecorder()
    loggers: Any = llm.llm_engine.logger_manager
    loggers.stat_loggers.append(recorder)
    passes = PassTimes() if settings.pass_times else None
    if passes is not None:
        passes.watch(llm)
    return Engine(variant, llm, recorder, max(0, _memory_bytes() - before), passes)


def _check_budget(variant: Variant, vllm_config) -> None:
    """A figure must not stand under a budget that was not used: TriForce rounds up what does not
    fit vLLM's KV block."""
    budget = vllm_config.additional_config[METHOD]["retrieval_budget"]
    if budget != variant.budget:
        raise BadInput(
            f"--budgets: {variant.budget} does not fit vLLM's KV block of "
            f"{vllm_config.cache_config.block_size} tokens; use {budget}, or a smaller block "
            "(--engine '{\"block_size\": 32}')"
        )


def end(engines: list[Engine]) -> None:
    """Frees them. Make the next engine before any other takes a step: the end of one takes
    vLLM's process groups with it."""
    engines.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fit_at_once(settings: Settings, target: ModelFacts, draft: ModelFacts | None) -> int:
    """How many engines fit into the memory that is free, at least 2."""
    if settings.engines_at_once is not None:
        return settings.engines_at_once
    models = [target] if draft is None else [target, draft]
    weights = 2 * sum(model.weights_bytes for model in models)
    kv_cache = max(kv_cache_bytes(settings, dtype, *models) for dtype in settings.dtypes)
    free = psutil.virtual_memory().available
    if not current_platform.is_cpu():
        free = torch.cuda.mem_get_info()[0]
    return max(2, int(SHARE_OF_FREE_MEMORY * free / (weights + kv_cache + OVERHEAD_BYTES)))


def peak_memory_kind() -> str:
    """What ``Engine.memory_bytes`` is here."""
    if current_platform.is_cpu():
        return "growth of the process's resident memory while the engine was made"
    return "device memory allocated while the engine was made, and the peak above it in a run"


def _memory_bytes() -> int:
    if current_platform.is_cpu():
        return psutil.Process().memory_info().rss
    return torch.cuda.memory_allocated()
