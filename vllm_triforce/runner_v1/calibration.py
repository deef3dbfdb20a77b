"""Measures Runner V1's passes at start-up, for the cost model (``controller/cost_model.py``).

The passes are real ones over the KV cache, which has just been allocated and is still empty.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.model_pass import PassInput, run_model, target_inputs
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.retrieval import RetrievalLevel
from vllm_triforce.runner_v1.sampling import SamplingRows, token_distribution
from vllm_triforce.runner_v1.sources.source import DraftSource
from vllm_triforce.runner_v1.speculator import SpeculatorV1

# Tokens of context at which attention takes next to no time.
_NO_CONTEXT = 16
# Batch sizes of the full passes.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class _Grid:
    """Lengths and contexts at which full passes of one request are measured."""

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int


# From the finest to the coarsest. Attention kernels work on tiles of queries: one more token may
# cost nothing, a whole tile, or save time where another kernel takes over.
_GRIDS = (
    _Grid((1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 20, 24, 25, 32, 33), (1024, 4096, 16384), 3),
    _Grid((1, 2, 4, 8, 12, 16, 17, 24, 33), (2048, 16384), 2),
    # A second token may cost more than the next six.
    _Grid((1, 2, 4, 8, 16, 17), (), 2),
    _Grid((1, 2, 8), (), 2),
    _Grid((1, 2), (), 1),
    _Grid((1,), (), 1),
)
# Budget of the full passes; a slow model is measured at fewer points, and no pass is longer than a
# share of the budget: beyond their longest context the cost model extrapolates.
_MAX_SECONDS = 8.0
_LONGEST_PASS = 0.1
# Context of the first pass that is timed.
_PROBED_CONTEXT = 2048
# Share of the longest pass's seconds that a pass of one token takes, about.
_ONE_TOKEN = 0.35


class Calibration:
    """Runs and times the passes.

    Args:
        attn_groups: vLLM's attention groups per KV cache group.
        block_sizes: tokens per block of each KV cache group.
        before_full_pass: called with request ids and the tokens of each (``AdapterSwitch``).
    """

    def __init__(
        self,
        speculator: SpeculatorV1,
        config: ResolvedConfig,
        target,
        vllm_config,
        attn_groups,
        block_sizes: list[int],
        num_blocks: int,
        device: torch.device,
        before_full_pass: Callable[[list[str], list[int]], None] | None = None,
    ) -> None:
        self._speculator = speculator
        level2 = speculator.level2
        self._retrieval = level2 if isinstance(level2, RetrievalLevel) else None
        self._before_full_pass = before_full_pass
        self._target = target
        self._vllm_config = vllm_config
        self._attn_groups = attn_groups
        self._block_sizes = block_sizes
        self._num_blocks = num_blocks
        self._device = device
        scheduler = vllm_config.scheduler_config
        self._length = config.num_speculative_tokens
        self._max_rows = min(scheduler.max_num_batched_tokens, 128)
        self._max_reqs = min(scheduler.max_num_seqs, config.max_speculating_seqs)
        max_context = vllm_config.model_config.max_model_len - self._length - 2
        self._max_context = max(1, min(max_context, (num_blocks - 2) * min(block_sizes)))
        self._context = min(config.calibration_context, self._max_context)

    def run(self) -> Measurements:
        """Measure all passes."""
        tokens, contexts, repeats = self._grid(*self._longest_pass())
        rows = [n for n in _ROWS if n <= self._max_rows]
        passes = [(n, 1, _NO_CONTEXT) for n in rows]
        passes += [(1, q, c) for q in tokens for c in contexts]
        runs = {args: partial(self._full_pass, *args) for args in passes}
        seconds = self._all_timed(runs, repeats)
        # More rows never take less time. Through noise, the cost model would extrapolate to 0.
        rising = np.maximum.accumulate([seconds[n, 1, _NO_CONTEXT] for n in rows]).tolist()
        draft = draft_per_row = draft_per_token = 0.0
        num_rows = min(4, self._max_reqs)
        if (model := self._speculator.level1.model) is not None:
            draft = self._draft(model, 1, repeats)
            draft_per_token = self._window(model, repeats, draft)
            if num_rows > 1:
                added_s = self._draft(model, num_rows, repeats) - draft
                draft_per_row = max(0.0, added_s / (num_rows - 1))
        return Measurements(
            list(zip(rows, rising)),
            [(q, [(c, seconds[1, q, c]) for c in contexts]) for q in tokens],
            *self._level2_passes(num_rows, repeats),
            draft,
            draft_per_row,
            draft_per_token,
            self._first_selection(repeats),
            self._sampling(32, repeats),
        )

    def _level2_passes(
        self, num_rows: int, repeats: int
    ) -> tuple[list[tuple[float, float]], list[tuple[float, list[tuple[float, float]]]]]:
        """Measure passes of level 2 of one request and of ``num_rows``.

        Returns:
            ``level2_by_tokens`` and ``level2_by_batch`` of ``Measurements``; 0 seconds where level
            2 takes no part.
        """
        context = float(self._context)
        if self._retrieval is None:
            return [(1.0, 0.0)], [(1.0, [(context, 0.0)])]
        max_tokens = self._length + 1  # limit of the tables of ``_batch()``
        tokens = sorted({min(q, max_tokens) for q in (1, 3, 8, max_tokens)})
        # Once more than the others: if it seems too slow, nothing is proposed, and so nothing
        # corrects it soon.
        seconds = {q: self._level2(1, q, repeats + 1) for q in tokens}
        # Nor do more tokens take less.
        least_s = np.minimum.accumulate([seconds[q] for q in reversed(tokens)])
        seconds = dict(zip(tokens, least_s[::-1].tolist()))
        one_s = seconds[tokens[0]]
        by_batch = [(1.0, [(context, one_s)])]
        if num_rows > 1:
            num_tokens = min(3, max_tokens)
            added_s = self._level2(num_rows, num_tokens, repeats) - seconds[num_tokens]
            by_batch.append((float(num_rows), [(context, one_s + max(0.0, added_s))]))
        return list(seconds.items()), by_batch

    def _longest_pass(self) -> tuple[int, float]:
        """Choose the longest context of full passes, from passes of most tokens at two others.

        Returns:
            The context, and the expected seconds of its pass of most tokens.
        """
        near, far = (min(c, self._max_context) for c in (_NO_CONTEXT, _PROBED_CONTEXT))
        runs = {c: partial(self._full_pass, 1, self._length + 1, c) for c in (near, far)}
        # All ranks must run the same passes.
        seconds = broadcast_from_first_rank(self._all_timed(runs, 1))
        if far == self._max_context:
            return far, seconds[far]
        per_token = max(1e-9, seconds[far] - seconds[near]) / (far - near)
        room = (_LONGEST_PASS * _MAX_SECONDS - seconds[near]) / per_token
        context = int(max(far, min(room, self._max_context)))
        return context, seconds[near] + (context - near) * per_token

    def _grid(self, longest: int, slowest: float) -> tuple[list[int], list[int], int]:
        """Choose the finest grid that fits the time budget.

        A pass is assumed to take a tenth of its seconds without context, and the rest in proportion
        to its context.

        Args:
            longest: context.
            slowest: seconds of the pass of most tokens there.

        Returns:
            Lengths, contexts and repeats.
        """
        for grid in _GRIDS:
            tokens = sorted({*(q for q in grid.tokens if q <= self._length), self._length + 1})
            inner = [c for c in grid.contexts if _NO_CONTEXT < c < longest]
            contexts = [min(_NO_CONTEXT, longest - 1), *inner, longest]
            shares = sum(0.1 + 0.9 * c / longest for c in contexts)
            shares *= sum(_ONE_TOKEN + (1 - _ONE_TOKEN) * q / tokens[-1] for q in tokens)
            if slowest * (grid.repeats + 1) * shares < _MAX_SECONDS:
                break
        return tokens, contexts, grid.repeats

    def _timed(self, run: Callable[[], object], repeats: int) -> float:
        """Return the seconds that ``run`` takes."""
        return self._all_timed({"": run}, repeats)[""]

    def _all_timed(self, runs: Mapping[Any, Callable], repeats: int) -> dict[Any, float]:
        """Return the median seconds of ``repeats`` of each of ``runs``, after a warm-up.

        Runs take turns, so that a short disturbance does not slow all repeats of one. Steps are
        compared with these seconds, hence no minimum.
        """
        seconds: dict[Any, list[float]] = {name: [] for name in runs}
        for _ in range(repeats + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        return {name: statistics.median(times[1:]) for name, times in seconds.items()}

    def _tables(self, num_rows: int, num_tokens: int, block_size: int) -> list[np.ndarray]:
        """Make block tables without vLLM's null block, 0: num_rows * [width], int32."""
        width = -(-num_tokens // block_size) + 1
        ids = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
        return list(1 + ids % (self._num_blocks - 1))

    def _full_pass(self, num_rows: int, num_tokens: int, context: int) -> None:
        """Run a full pass of the target."""
        context = min(context, self._max_context)
        feed, positions = [[0] * num_tokens] * num_rows, [context] * num_rows
        inputs = PassInput.from_rows(feed, positions, self._device)
        metadata: dict = {}
        slots: dict[str, torch.Tensor] = {}
        for groups, block_size in zip(self._attn_groups, self._block_sizes):
            tables = self._tables(num_rows, context + num_tokens, block_size)
            mapping = inputs.slot_mapping(tables, block_size)
            table = torch.from_numpy(np.stack(tables)).to(self._device)
            common = inputs.common_metadata(table, mapping)
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
                slots |= dict.fromkeys(group.layer_names, mapping)
        if self._before_full_pass is not None:
            self._before_full_pass(
                [f"calibration {row}" for row in range(num_rows)], [num_tokens] * num_rows
            )
        more = target_inputs(self._target, self._vllm_config, inputs.token_ids, inputs.positions)
        hidden, _ = run_model(self._target, self._vllm_config, inputs, metadata, slots, **more)
        self._target.compute_logits(hidden)

    def _level2(self, num_rows: int, num_tokens: int, repeats: int) -> float:
        """Measure a pass of level 2 over a context that is larger than the budget.

        One of ``TOKENS_PER_SELECTION`` passes selects, as where each pass adds one token.
        """
        batch, proposal = self._batch(num_rows, self._context)
        level2, rows = self._retrieval, list(range(num_rows))
        assert level2 is not None
        level2.begin(batch)
        drafts = [[0] * (num_tokens - 1)] * num_rows

        def run(selects: bool) -> None:
            if selects and level2.pass_selection is not None:
                level2.pass_selection.renew()
            level2.forward(batch, proposal, rows, drafts)

        runs = {selects: partial(run, selects) for selects in (True, False)}
        seconds = self._all_timed(runs, repeats)
        for request_id in batch.request_ids:
            level2.release(request_id)
        return seconds[False] + (seconds[True] - seconds[False]) / TOKENS_PER_SELECTION

    def _first_selection(self, repeats: int) -> float:
        """Measure a request's first selection, in seconds per token of context."""
        context = self._context
        if (level2 := self._retrieval) is None:
            return 0.0
        batch, _ = self._batch(1, context)
        (request_id,) = batch.request_ids

        def begin():
            level2.release(request_id)
            level2.invalidate_summaries(tuple(tables[0].tolist() for tables in batch.block_tables))
            level2.begin(batch)

        seconds = self._timed(begin, repeats)
        level2.release(request_id)
        return seconds / context

    def _window(self, model: DraftSource, repeats: int, pass_seconds: float) -> float:
        """Measure how long the draft takes to read its window, in seconds per token.

        Args:
            pass_seconds: seconds of a pass of one token.
        """
        batch, proposal = self._batch(1, self._context)
        (request_id,) = batch.request_ids
        num_tokens = model.num_uncached_tokens(request_id, len(batch.token_ids[0]))

        def draft():
            model.release(request_id)
            model.prepare_dummy(batch)
            self._run_draft(model, batch, proposal, 1)

        seconds = self._timed(draft, repeats)
        model.release(request_id)
        return max(0.0, seconds - pass_seconds) / num_tokens

    def _draft(self, model: DraftSource, num_rows: int, repeats: int, num_passes: int = 4) -> float:
        """Measure a pass of the draft."""
        batch, proposal = self._batch(num_rows, self._context)
        model.prepare_dummy(batch)
        run = partial(self._run_draft, model, batch, proposal, num_passes)
        seconds = self._timed(run, repeats) / num_passes
        for request_id in batch.request_ids:
            self._speculator.level1.release(request_id)
        return seconds

    def _run_draft(
        self, model: DraftSource, batch: DraftBatch, proposal: Proposal, num_tokens: int
    ) -> None:
        """Draft ``num_tokens`` tokens for each row with the model."""
        rows = list(range(len(batch)))
        counts, matches = [num_tokens] * len(rows), model.find_matches(batch, proposal, rows)
        noise = self._speculator.noise
        model.draft(batch, proposal, rows, counts, matches, batch.sampling, noise)

    def _sampling(self, num_rows: int, repeats: int) -> float:
        """Measure the sampling of a row of logits, without top-k and top-p.

        The controller learns from the steps how long these take: tens of times longer where the
        vocabulary is sorted for them.
        """
        vocab_size = self._vllm_config.model_config.get_vocab_size()
        logits = torch.zeros(num_rows, vocab_size, device=self._device)
        sampling = SamplingRows(torch.ones(num_rows, device=self._device))
        return self._timed(lambda: token_distribution(logits, sampling), repeats) / num_rows

    def _batch(self, num_rows: int, context: int) -> tuple[DraftBatch, Proposal]:
        """Make a batch of dummy requests."""
        tables = [
            self._tables(num_rows, context + self._length + 1, block_size)
            for block_size in self._block_sizes
        ]
        batch = DraftBatch(
            request_ids=[f"calibration {row}" for row in range(num_rows)],
            token_ids=[np.zeros(context + 1, dtype=np.int32)] * num_rows,
            num_computed_tokens=[context] * num_rows,
            # The tables must reach as far as the longest pass that is measured.
            max_num_tokens=[self._length + 1] * num_rows,
            block_tables=tables,
            queries=[self._query] * num_rows,
            sampling=SamplingRows(torch.zeros(num_rows, device=self._device)),
        )
        return batch, Proposal.empty(num_rows)

    def _query(self) -> torch.Tensor:
        """Make a request's queries, [layers, heads, head_dim], for level 2's selection."""
        assert self._retrieval is not None
        shape = self._retrieval.attention.query_shape
        dtype = self._vllm_config.model_config.dtype
        return torch.zeros(shape, dtype=dtype, device=self._device)


def broadcast_from_first_rank(value):
    """Return the first rank's value on every rank of the tensor-parallel group.

    Ranks must decide alike, so they use one rank's measured times.
    """
    group = get_tp_group()
    return value if group.world_size == 1 else group.broadcast_object(value, src=0)
