"""Warm up proposals and measure passes on Model Runner V2, before the first request.

Full passes are vLLM's dummy runs, which use the CUDA graphs of real steps. Proposals are real ones,
of requests that do not exist.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.config.draft_sources import MODEL_SOURCE
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import HIERARCHICAL, LEVEL2_ALONE
from vllm_triforce.core.calibration import (
    NO_CONTEXT,
    PassTimer,
    Points,
    measure_draft,
    measure_full_passes,
    rising,
)
from vllm_triforce.kernels.rows import SamplingParameters
from vllm_triforce.runner_v2.batch import BatchV2
from vllm_triforce.runner_v2.build import SpeculatorPartsV2
from vllm_triforce.runner_v2.sampling import SamplingV2
from vllm_triforce.runner_v2.speculator import SpeculatorV2


class DummyBatches:
    """Makes batches of requests that do not exist, over unused KV blocks."""

    def __init__(self, built: SpeculatorPartsV2, runner) -> None:
        self._built = built
        self._runner = runner
        self.device = built.context.device
        self.max_rows = built.rows.max_rows
        self._num_batches = 0
        self._vocab_size = runner.sampler.sampling_states.vocab_size

    def make(
        self, num_rows: int, context: int, num_tokens: int, num_rounds: int, is_greedy: bool
    ) -> BatchV2:
        """Make a batch of new requests, greedy ones or with all sampling parameters."""
        states, size = np.arange(num_rows), max(self._runner.block_tables.block_sizes)
        self._num_batches += 1
        return BatchV2(
            request_ids=[f"trial {self._num_batches}, {row}" for row in range(num_rows)],
            batch_rows=states,
            states=states,
            max_computed_tokens=np.full(num_rows, context),
            reserved_tokens=np.full(num_rows, -(-(context + num_tokens + 1) // size) * size),
            max_lens=np.full(num_rows, context + 2 * num_tokens + 4),
            max_num_tokens=np.full(num_rows, num_tokens),
            max_num_rounds=np.full(num_rows, num_rounds),
            is_one_hot=np.zeros(num_rows, dtype=bool),
            sampling=SamplingV2(is_greedy, has_masks=not is_greedy, has_processors=not is_greedy),
            tables=self._tables(num_rows, context + 2 * num_tokens),
            num_computed=self._by_state(context, torch.int32),
            num_sampled=self._full(num_rows, 1, torch.int32),
            last_sampled=self._by_state(0, torch.int64)[:, None],
            parameters=SamplingParameters(
                self._by_state(0.0 if is_greedy else 1.0, torch.float32),
                self._by_state(1, torch.int64),
                self._by_state(self._vocab_size, torch.int32),
                self._by_state(0.9, torch.float32),
                self._by_state(0.0, torch.float32),
            ),
            all_token_ids=self._runner.req_states.all_token_ids.gpu,
        )

    def forget(self, batch: BatchV2) -> None:
        for request_id in batch.request_ids:
            self._built.slots.release(request_id)

    def _tables(self, num_rows: int, num_tokens: int) -> list[torch.Tensor]:
        """Fill the block tables of each KV cache group; block 0 is vLLM's null block."""
        tables = []
        for size, buffer in zip(self._runner.block_tables.block_sizes, self._built.tables):
            width = buffer.shape[1]
            ids = torch.arange(num_rows * width, dtype=torch.int32, device=self.device)
            ids = 1 + ids.view(num_rows, width) % (self._runner.kv_cache_config.num_blocks - 1)
            ids[:, -(-num_tokens // size) + 1 :] = 0
            tables.append(buffer[:num_rows].copy_(ids))
        return tables

    def _by_state(self, value, dtype: torch.dtype) -> torch.Tensor:
        return self._full(self._runner.max_num_reqs, value, dtype)

    def _full(self, count: int, value, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=self.device)


_CONTEXTS = (2048, 8192, 32_768)
# Batch sizes that measure how attention scales with the number of requests.
_BATCH_SIZES = (2, 4, 8)
# Batch sizes of level 2's passes, and their shortest context if the model has longer ones.
_LEVEL2_SIZES, _LEVEL2_CONTEXT = (1, 4, 8), 8192
_REPEATS = 3
# Rounds of two proposals; a round takes its share of the difference, which has a selection where
# each round adds one token.
_FEW_ROUNDS, _MORE_ROUNDS = 1, 1 + TOKENS_PER_SELECTION


@dataclass
class CalibrationV2:
    """Warms up and measures the passes of a step.

    Args:
        dummy_run: vLLM's ``GPUModelRunner._dummy_run``.
        max_context: tokens of a request at most.
        max_tokens: tokens of a pass at most.
        num_kv_tokens: tokens that the KV cache holds.
    """

    config: ResolvedConfig
    dummy_run: Callable
    speculator: SpeculatorV2
    batches: DummyBatches
    max_context: int
    max_reqs: int
    max_tokens: int
    num_kv_tokens: int

    def __post_init__(self) -> None:
        self._device = self.batches.device
        self._context = min(self.config.calibration_context, self.max_context)
        self._query_len = self.config.num_speculative_tokens + 1
        # On a CPU kernels are interpreted, a run takes seconds, and one is enough.
        self._is_interpreted = self._device.type == "cpu"
        # Disturbances only slow a run, hence the minimum.
        self._timer = PassTimer(0, min)
        if not self._is_interpreted:
            self._timer = PassTimer(_REPEATS, min, torch.accelerator.synchronize)

    def warm_up(self) -> None:
        """Run every kind of proposal once, so that no request waits for a compiler.

        One request and two, greedy and with all sampling parameters, by each route.
        """
        levels = [HIERARCHICAL] if self.config.uses_level2 else []
        is_multimodal = self.speculator.context.vllm_config.model_config.is_multimodal_model
        if levels and is_multimodal and MODEL_SOURCE in self.config.sources[:1]:
            levels.append(LEVEL2_ALONE)  # of requests with images
        for is_greedy in (True, False):
            for num_rows in sorted({1, min(2, self.batches.max_rows)}):
                for route in [*levels, *self.config.sources]:
                    self._propose(route, num_rows, self._context, _MORE_ROUNDS, is_greedy)

    def run(self) -> Measurements:
        contexts = [*(c for c in _CONTEXTS if c < self.max_context), self.max_context]
        full = measure_full_passes(
            self._timer,
            self._full_pass,
            self.max_reqs,
            (1, self._query_len),
            [NO_CONTEXT, *contexts],
        )
        full_context, by_num_reqs = self._measure_batches(contexts)
        draft = draft_per_row = 0.0
        for route in filter(self.speculator.keeps_window, self.config.sources):
            round_s, round_per_row = measure_draft(
                partial(self._measure_round, route, self._context), self.batches.max_rows
            )
            draft, draft_per_row = round_s / self.config.gamma, round_per_row / self.config.gamma
        level2_by_batch = self._measure_level2(contexts, draft, draft_per_row)
        return Measurements(
            *full,
            [(1.0, level2_by_batch[0][1][0][1])],
            level2_by_batch,
            draft,
            draft_per_row,
            full_by_num_reqs=by_num_reqs,
            full_context=float(full_context),
        )

    def _full_pass(self, num_reqs: int, num_tokens: int, context: int) -> None:
        """Run a full pass; ``num_tokens`` a request are 1 or ``num_speculative_tokens + 1``."""
        self.dummy_run(
            num_reqs * num_tokens,
            uniform_decode=num_tokens > 1,
            context_len=min(context, self.max_context),
        )

    def _measure_batches(self, contexts: list[int]) -> tuple[int, list[tuple[float, float, float]]]:
        """Measure ``full_context`` and ``full_by_num_reqs`` of ``Measurements``.

        FlashAttention 2 does not split the context of a query of several tokens, so that one
        request leaves idle the multiprocessors that several fill. The context is the longest that
        the KV cache holds for all.
        """
        max_reqs = min(self.max_reqs, self.max_tokens // self._query_len)
        sizes = [n for n in _BATCH_SIZES if n <= max_reqs]
        fitting = [c for c in contexts if sizes and sizes[-1] * c <= self.num_kv_tokens]
        if not fitting:
            return 0, []
        context = fitting[-1]
        passes = [(n, q) for n in sizes for q in (1, self._query_len)]
        runs = {(n, q): partial(self._full_pass, n, q, context) for n, q in passes}
        seconds = self._timer.all_seconds(runs)
        return context, [(n, seconds[n, 1], seconds[n, self._query_len]) for n in sizes]

    def _measure_level2(
        self, contexts: list[int], draft: float, draft_per_row: float
    ) -> list[tuple[float, Points]]:
        """Measure ``Measurements.level2_by_batch``, 0 without level 2.

        Level 2 reads a share of each context, and looks through all of it when it selects. The
        draft model's seconds are part of each round.
        """
        if not self.config.uses_level2:
            return [(1.0, [(float(self._context), 0.0)])]
        sizes = sorted({min(n, self.batches.max_rows) for n in _LEVEL2_SIZES})
        contexts = [c for c in contexts if c >= _LEVEL2_CONTEXT] or contexts[-1:]
        if self._is_interpreted:
            sizes, contexts = sizes[:2], [self._context]
        num_drafts = self.config.gamma * self.speculator.keeps_window(self.config.sources[0])
        by_batch = []
        for n in sizes:
            drafts_s = num_drafts * (draft + (n - 1) * draft_per_row)
            rounds_s = [self._measure_round(HIERARCHICAL, c, n) for c in contexts]
            by_batch.append([max(0.0, s - drafts_s) for s in rounds_s])
        return [(n, list(zip(contexts, seconds))) for n, seconds in zip(sizes, rising(by_batch))]

    def _measure_round(self, route: str, context: int, num_rows: int) -> float:
        """Measure a round as the difference of a longer and a shorter proposal."""
        short_s, long_s = (
            self._timer.seconds(self._propose, route, num_rows, context, num_rounds)
            for num_rounds in (_FEW_ROUNDS, _MORE_ROUNDS)
        )
        return max(0.0, long_s - short_s) / (_MORE_ROUNDS - _FEW_ROUNDS)

    def _propose(
        self, route: str, num_rows: int, context: int, num_rounds: int, is_greedy: bool = True
    ) -> None:
        speculator, num_tokens = self.speculator, self.config.num_speculative_tokens
        batch = self.batches.make(num_rows, context, num_tokens, num_rounds, is_greedy)
        states = torch.arange(num_rows, device=self._device)
        draft_tokens = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=self._device)
        num_drafts = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        speculator.count_full_pass(num_drafts, states, batch.num_sampled)
        speculator.begin(draft_tokens, states)
        speculator.propose(route, batch, draft_tokens)
        speculator.begin(draft_tokens, states)
        self.batches.forget(batch)


@torch.inference_mode()
def warm_up_proposals(
    config: ResolvedConfig,
    runner,
    built: SpeculatorPartsV2,
    measures: bool,
) -> Measurements | None:
    """Run every kind of proposal once on a GPU, which compiles the kernels, and measure passes."""
    is_gpu = built.context.device.type != "cpu"
    if not (is_gpu or measures):
        return None
    block_sizes = runner.block_tables.block_sizes
    calibration = CalibrationV2(
        config,
        runner._dummy_run,
        built.speculator,
        DummyBatches(built, runner),
        max(1, runner.max_model_len - 2 * config.num_speculative_tokens - 4),
        runner.max_num_reqs,
        runner.max_num_tokens,
        runner.kv_cache_config.num_blocks * min(block_sizes) // len(block_sizes),
    )
    # Finished requests, as those of vLLM's warm-up, hold their slots until the next step.
    for request_id in list(built.slots):
        built.slots.release(request_id)
    adapters = nullcontext() if built.adapters is None else built.adapters.with_dummy_adapters()
    with built.speculator.without_counting(), adapters:
        if is_gpu:
            calibration.warm_up()
        return calibration.run() if measures else None
