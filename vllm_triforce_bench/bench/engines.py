"""Engines of one process, alive side by side, and a batch through one of them, timed."""

import gc
import itertools
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from vllm.config import ModelConfig
from vllm.entrypoints.llm import LLM
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_triforce.config.keys import METHOD
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import engine_arguments
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.options import BadInput


class StepRecorder(StatLoggerBase):
    """Statistics of one engine's steps; vLLM's Prometheus metrics are those of its last engine."""

    def __init__(self, vllm_config=None, engine_index: int = 0) -> None:
        self.steps: list[tuple[float, Any, Any]] = []
        """End, ``SchedulerStats`` and ``IterationStats`` of each step; None without outputs."""

    def record(
        self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0
    ) -> None:
        self.steps.append((time.perf_counter(), scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        pass


@dataclass(frozen=True)
class Decoded:
    """A decoded batch: outputs in the order of the prompts, and steps as the recorder has them."""

    outputs: list[RequestOutput]
    steps: list[tuple[float, Any, Any]]
    seconds: float

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def iterations(self) -> list[tuple[float, Any]]:
        """Ends and statistics of steps with outputs."""
        return [(end, stats) for end, _, stats in self.steps if stats is not None]

    @property
    def time_to_first_token_s(self) -> list[float]:
        return [s for _, stats in self.iterations for s in stats.time_to_first_tokens_iter]

    @property
    def inter_token_latency_s(self) -> list[float]:
        """Times between two outputs of a request, as ``vllm bench serve`` counts."""
        return [s for _, stats in self.iterations for s in stats.inter_token_latencies_iter]

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of the batch after the first, over the time from the first to the last.

        Raises:
            ValueError: all tokens arrived at once.
        """
        ends = [(end, n) for end, stats in self.iterations if (n := stats.num_generation_tokens)]
        if len(ends) < 2:
            raise ValueError("all tokens arrived in one step; ask for more --tokens")
        return sum(count for _, count in ends[1:]) / (ends[-1][0] - ends[0][0])

    @property
    def speculation(self) -> dict[str, Any]:
        """Sums of vLLM's statistics; ``num_drafts`` counts requests that verified a proposal."""
        stats = [s.spec_decoding_stats for _, s, _ in self.steps if s.spec_decoding_stats]
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        by_position = (each.num_accepted_tokens_per_pos for each in stats)
        sums = map(sum, itertools.zip_longest(*by_position, fillvalue=0))
        return {
            **{name: sum(getattr(each, name) for each in stats) for name in names},
            "num_accepted_tokens_per_pos": list(sums),
        }


@dataclass
class Engine:
    """A running engine of one method.

    Args:
        memory_bytes: growth of the process while the engine was made (CPU), or bytes that the
            device allocated (GPU).
    """

    variant: Variant
    llm: LLM
    recorder: StepRecorder
    memory_bytes: int

    def levels(self) -> LevelCounters | None:
        return counters_of(self.llm) if self.variant.is_triforce else None

    def decode(
        self, prompts: list[list[int]], num_tokens: int, temperature: float, top_p: float, seed: int
    ) -> Decoded:
        """Decode a batch past any end-of-sequence token.

        Args:
            seed: seed of the process's generators. Requests have no seeds: they would take another
                way through vLLM's sampler.
        """
        set_random_seed(seed % (1 << 32))
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p if temperature else 1.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self.recorder.steps.clear()
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        steps = list(self.recorder.steps)
        return Decoded(outputs, steps, steps[-1][0] - begin)


def start(
    settings: Settings,
    dtype: str,
    variant: Variant,
    target: ModelConfig,
    draft: ModelConfig | None,
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
    recorder = StepRecorder()
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


def _memory_bytes() -> int:
    if current_platform.is_cpu():
        return psutil.Process().memory_info().rss
    return torch.cuda.memory_allocated()
