"""Requests that do not exist: proposals for them compile kernels at start, and are timed.

Measures the passes on Model Runner V2 at start-up, for the controller's cost model.

Full passes are vLLM's own dummy runs, which take the CUDA graphs that steps take; proposals are
real ones, of requests that do not exist.

What Model Runner V2 does with proposals before the first request comes.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.controller.routes import LEVELS
from vllm_triforce.kernels.distributions import SamplingParameters
from vllm_triforce.runner_v2.batch import BatchV2, SamplingV2
from vllm_triforce.runner_v2.build import SpeculatorBuild


class TrialBatches:
    """Makes them, over KV blocks that hold nothing yet.

    Args:
        build: the loop and its parts (``runner_v2/build.py``).
        runner: vLLM's, whose block tables say how blocks are laid out.
    """

    def __init__(self, build, runner, num_blocks: int, device: torch.device) -> None:
        self._build = build
        self._runner = runner
        self._num_blocks = num_blocks
        self._device = device
        self._num_made = 0
        self._vocab_size = runner.sampler.sampling_states.vocab_size

    @property
    def max_rows(self) -> int:
        """Requests that can be in one."""
        return self._build.rows.max_rows

    def make(
        self, num_rows: int, context: int, num_tokens: int, num_rounds: int, is_greedy: bool
    ) -> BatchV2:
        """New requests of so much context, that propose as much.

        Args:
            is_greedy: whether nothing else is asked of their tokens, or everything that can be.
        """
        states, size = np.arange(num_rows), max(self._runner.block_tables.block_sizes)
        self._num_made += 1
        return BatchV2(
            request_ids=[f"trial {self._num_made}, {row}" for row in range(num_rows)],
            batch_rows=states,
            states=states,
            max_computed_tokens=np.full(num_rows, context),
            reserved=np.full(num_rows, -(-(context + num_tokens + 1) // size) * size),
            limits=np.full(num_rows, context + 2 * num_tokens + 4),
            max_num_tokens=np.full(num_rows, num_tokens),
            max_num_rounds=np.full(num_rows, num_rounds),
            is_one_hot=np.zeros(num_rows, dtype=bool),
            sampling=SamplingV2(is_greedy, has_masks=not is_greedy, is_shaped=not is_greedy),
            tables=self._tables(num_rows, context + 2 * num_tokens),
            num_computed=self._of_states(context, torch.int32),
            num_sampled=self._filled(num_rows, 1, torch.int32),
            last_sampled=self._of_states(0, torch.int64)[:, None],
            parameters=SamplingParameters(
                self._of_states(0.0 if is_greedy else 1.0, torch.float32),
                self._of_states(1, torch.int64),
                self._of_states(self._vocab_size, torch.int32),
                self._of_states(0.9, torch.float32),
                self._of_states(0.0, torch.float32),
            ),
            all_token_ids=self._runner.req_states.all_token_ids.gpu,
        )

    def forget(self, batch: BatchV2) -> None:
        """Nothing is kept of its requests."""
        for request_id in batch.request_ids:
            self._build.slots.release(request_id)

    def _tables(self, num_rows: int, num_tokens: int) -> list[torch.Tensor]:
        """Of each KV cache group; block 0 is vLLM's null block."""
        tables = []
        for size, own in zip(self._runner.block_tables.block_sizes, self._build.tables):
            width = own.shape[1]
            ids = torch.arange(num_rows * width, dtype=torch.int32, device=self._device)
            ids = 1 + ids.view(num_rows, width) % (self._num_blocks - 1)
            ids[:, -(-num_tokens // size) + 1 :] = 0
            tables.append(own[:num_rows].copy_(ids))
        return tables

    def _of_states(self, value, dtype: torch.dtype) -> torch.Tensor:
        return self._filled(self._runner.max_num_reqs, value, dtype)

    def _filled(self, count: int, value, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=self._device)


# Next to no context: what is measured there is the pass without its attention.
_NO_CONTEXT = 16
_CONTEXTS = (2048, 8192, 32_768)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Requests of the passes that say what company does to attention.
_SEVERAL = (2, 4, 8)
_REPEATS = 3
# Rounds of the two proposals whose difference is what rounds take.
_FEW, _MORE = 1, 3


class CalibrationV2:
    """The passes that can be measured.

    Args:
        dummy_run: vLLM's ``GPUModelRunner._dummy_run``.
        triforce: proposes (``runner_v2/proposer.py``).
        max_context: tokens of a request at most.
        max_reqs: of a batch.
        max_tokens: of a pass.
        num_kv_tokens: for which there is KV cache.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        dummy_run: Callable,
        triforce,
        batches: TrialBatches,
        max_context: int,
        max_reqs: int,
        max_tokens: int,
        num_kv_tokens: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self._dummy_run = dummy_run
        self._triforce = triforce
        self._batches = batches
        self._max_context = max_context
        self._max_reqs = max_reqs
        self._max_tokens = max_tokens
        self._num_kv_tokens = num_kv_tokens
        self._device = device
        num_places = config.num_speculative_tokens
        self._draft_tokens = torch.zeros(
            batches.max_rows, num_places, dtype=torch.int64, device=device
        )

    def warm_up(self) -> None:
        """Runs everything once that a proposal may need, so that no request waits for a compiler:
        for one request and for several, greedy and with everything that can be asked."""
        context = min(2 * self._config.retrieval_budget, self._max_context)
        for is_greedy in (True, False):
            for num_rows in sorted({1, min(2, self._batches.max_rows)}):
                for route in self._routes():
                    self._propose(route, num_rows, context, _MORE, is_greedy)

    def run(self) -> Measurements:
        """Seconds of everything."""
        longest = self._config.num_speculative_tokens + 1
        contexts = [_NO_CONTEXT, *(c for c in _CONTEXTS if c < self._max_context)]
        contexts.append(self._max_context)
        rows = [n for n in _ROWS if n <= self._max_reqs]
        by_rows = [(float(n), self._full_pass(n, 1, _NO_CONTEXT)) for n in rows]
        by_tokens = [
            (float(q), [(float(c), self._full_pass(1, q, c)) for c in contexts])
            for q in (1, longest)
        ]
        context, full_by_num_reqs = self._several(contexts[1:], longest)
        draft = draft_per_row = 0.0
        several = min(4, self._batches.max_rows)
        for route in self._routes():
            if self._triforce.keeps_window(route):
                draft = self._round(route, 1) / self._config.gamma
                if several > 1:
                    more = self._round(route, several) / self._config.gamma - draft
                    draft_per_row = max(0.0, more / (several - 1))
        # Of a round.
        num_drafts = self._config.gamma * self._triforce.keeps_window(self._config.sources[0])
        level2 = max(0.0, self._round(LEVELS, 1) - num_drafts * draft)
        level2_per_row = 0.0
        if several > 1:
            together = self._round(LEVELS, several) - num_drafts * (
                draft + (several - 1) * draft_per_row
            )
            level2_per_row = max(0.0, (together - level2) / (several - 1))
        return Measurements(
            by_rows,
            by_tokens,
            [(1, level2)],
            level2_per_row,
            draft,
            draft_per_row,
            selection_per_token=self._first_selection(),
            full_by_num_reqs=full_by_num_reqs,
            full_context=float(context),
        )

    def _routes(self) -> list[str]:
        return [LEVELS, *self._config.sources]

    def _full_pass(self, num_reqs: int, num_tokens: int, context: int) -> float:
        """Of requests with so many tokens each: 1, or as many as a proposal and one more."""

        def run() -> None:
            self._dummy_run(
                num_reqs * num_tokens,
                uniform_decode=num_tokens > 1,
                context_len=min(context, self._max_context),
            )

        return self._timed(run)

    def _several(
        self, contexts: list[int], longest: int
    ) -> tuple[int, list[tuple[float, float, float]]]:
        """Full passes of several requests: FlashAttention 2 divides no context among a longer
        query's blocks, so that one request leaves idle what several fill.

        Returns:
            The longest context that as many have room for, and ``Measurements.full_by_num_reqs``.
        """
        most = min(self._max_reqs, self._max_tokens // longest)
        sizes = [n for n in _SEVERAL if n <= most]
        fitting = [c for c in contexts if sizes and sizes[-1] * c <= self._num_kv_tokens]
        if not fitting:
            return 0, []
        context = fitting[-1]
        return context, [
            (
                float(n),
                self._full_pass(n, 1, context),
                self._full_pass(n, longest, context),
            )
            for n in sizes
        ]

    def _round(self, route: str, num_rows: int) -> float:
        context = min(2 * self._config.retrieval_budget, self._max_context)
        few, more = (
            self._timed(partial(self._propose, route, num_rows, context, n, True))
            for n in (_FEW, _MORE)
        )
        return max(0.0, more - few) / (_MORE - _FEW)

    def _first_selection(self) -> float:
        """Of a token of context, where nothing is known of a request."""
        short = min(self._config.retrieval_budget, self._max_context // 2)
        longer = self._max_context
        few, more = (
            self._timed(partial(self._propose, LEVELS, 1, n, _FEW, True)) for n in (short, longer)
        )
        return max(0.0, more - few) / max(1, longer - short)

    def _propose(
        self, route: str, num_rows: int, context: int, num_rounds: int, is_greedy: bool
    ) -> None:
        triforce = self._triforce
        batch = self._batches.make(
            num_rows, context, self._config.num_speculative_tokens, num_rounds, is_greedy
        )
        states = torch.arange(num_rows, device=self._device)
        draft_tokens = self._draft_tokens[:num_rows]
        nothing = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        triforce.count_full_pass(nothing, states, batch.num_sampled)
        triforce.begin(draft_tokens, states)
        if route == LEVELS:
            triforce.propose(batch, draft_tokens)
        else:
            triforce.propose_directly(route, batch, draft_tokens)
        triforce.begin(draft_tokens, states)
        self._batches.forget(batch)

    def _timed(self, run: Callable[[], None]) -> float:
        """The fastest of a few, after a first one: what disturbs only makes it slower. On a CPU,
        where kernels are interpreted, one takes seconds, and is enough."""
        best = float("inf")
        repeats = 0 if self._device.type == "cpu" else _REPEATS
        for turn in range(repeats + 1):
            self._wait()
            start = time.perf_counter()
            run()
            self._wait()
            if turn or not repeats:
                best = min(best, time.perf_counter() - start)
        return best

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


@torch.inference_mode()
def warm_up_proposals(
    config: ResolvedConfig,
    runner,
    built: SpeculatorBuild,
    num_blocks: int,
    device: torch.device,
    measures: bool,
) -> Measurements | None:
    """Runs every kind of proposal once on a GPU, where kernels are compiled for it.

    Args:
        measures: whether they are timed.

    Returns:
        What passes take; None where they are not timed.
    """
    is_gpu = device.type != "cpu"
    if not (is_gpu or measures):
        return None
    calibration = CalibrationV2(
        config,
        runner._dummy_run,
        built.triforce,
        TrialBatches(built, runner, num_blocks, device),
        max(1, runner.max_model_len - 2 * config.num_speculative_tokens - 4),
        runner.max_num_reqs,
        runner.max_num_tokens,
        num_blocks * min(runner.block_tables.block_sizes) // len(runner.block_tables.block_sizes),
        device,
    )
    # Requests that have left still have theirs, as those that vLLM warms up with: that they have
    # is seen in the next step.
    for request_id in built.slots.request_ids():
        built.slots.release(request_id)
    trials = nullcontext() if built.adapters is None else built.adapters.trials()
    with built.recorder.pausing(), trials:
        if is_gpu:
            calibration.warm_up()
        measured = calibration.run() if measures else None
    built.triforce.reset_counters()
    return measured
