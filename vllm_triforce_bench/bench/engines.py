"""Engines of one process, alive side by side, and a batch through one of them, timed."""

import gc
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy
import psutil
import torch
from vllm.entrypoints.llm import LLM
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_triforce.config.keys import METHOD
from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.vllm_patches.cpu_build import fix_kernel_rebinding
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import ModelFacts, engine_arguments
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.options import BadInput


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
            "num_accepted_tokens_per_pos": list(
                map(sum, itertools.zip_longest(*by_position, fillvalue=0))
            ),
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


def _memory_bytes() -> int:
    if current_platform.is_cpu():
        return psutil.Process().memory_info().rss
    return torch.cuda.memory_allocated()


@dataclass
class Streamed:
    """Outputs by request; times are seconds since the batch was added.

    Args:
        arrivals: for each request, time and number of tokens of outputs with tokens.
        num_cached_tokens: prompt tokens in the prefix cache.
    """

    token_ids: list[list[int]]
    arrivals: list[list[tuple[float, int]]]
    num_cached_tokens: list[int] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def time_to_first_token_s(self) -> list[float]:
        return [arrivals[0][0] for arrivals in self.arrivals]

    @property
    def inter_token_latency_s(self) -> list[float]:
        """Times between two outputs of a request, as ``vllm bench serve`` counts."""
        return [
            later[0] - earlier[0]
            for arrivals in self.arrivals
            for earlier, later in itertools.pairwise(arrivals)
        ]

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of the batch after the first, over the time from the first to the last.

        Raises:
            ValueError: all tokens arrived at once.
        """
        flat = [arrival for arrivals in self.arrivals for arrival in arrivals]
        first, last = min(flat)[0], max(flat)[0]
        if last <= first:
            raise ValueError("all tokens arrived in one step; ask for more --tokens")
        return sum(count for when, count in flat if when > first) / (last - first)


def stream(
    llm,
    prompts: list[list[int]],
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Streamed:
    """Decode a batch past any end-of-sequence token.

    Args:
        seed: seed of the process's generators. Requests have no seeds: they would take another
            way through vLLM's sampler.
    """
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p if temperature else 1.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )
    engine = llm.llm_engine
    names = [f"bench-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
    index = {name: i for i, name in enumerate(names)}
    streamed = Streamed([[] for _ in prompts], [[] for _ in prompts], [0] * len(prompts))
    begin = time.perf_counter()
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begin
        streamed.num_steps += 1
        for output in outputs:
            i, token_ids = index[output.request_id], output.outputs[0].token_ids
            if token_ids:
                streamed.token_ids[i] += token_ids
                streamed.arrivals[i].append((now, len(token_ids)))
            streamed.num_cached_tokens[i] = output.num_cached_tokens or 0
    streamed.seconds = now
    return streamed
