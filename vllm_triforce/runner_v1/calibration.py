"""Measures Runner V1's passes at start-up (``core/calibration.py``).

The passes are real ones over the KV cache, which has just been allocated and is still empty.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.sample.rejection_sampler import rejection_sample

from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.config import ResolvedConfig
from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.calibration import (
    NO_CONTEXT,
    PassTimer,
    Points,
    measure_draft,
    measure_full_passes,
)
from vllm_triforce.core.model_pass import PassInput, run_model, target_inputs
from vllm_triforce.runner_v1.batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.rejection import acceptance_probs
from vllm_triforce.runner_v1.sampling import SamplingRows
from vllm_triforce.runner_v1.sources.source import DraftSource
from vllm_triforce.runner_v1.speculator import SpeculatorV1

# Lengths and contexts of full passes of one request; a slow model is measured at the first lengths
# alone. Attention kernels work on tiles of queries: one more token may cost nothing, a whole tile,
# or save time where another kernel takes over. A second token may cost more than the next six.
_TOKENS = (1, 2, 8, 17, 4, 16, 33, 12, 24, 9, 5, 13, 25, 20, 32)
_CONTEXTS = (2048, 16384)
# With so few lengths no contexts between the shortest and the longest: attention is nearly linear.
_FEW_LENGTHS = 4
# Runs of a pass whose median counts.
_REPEATS = 3
# Budget of the full passes. No pass is longer than a share of it: beyond their longest context the
# cost model extrapolates.
_MAX_SECONDS = 8.0
_LONGEST_PASS = 0.1
# Context of the first pass that is timed.
_PROBED_CONTEXT = 2048
# Share of the longest pass's seconds that a pass of one token takes, about.
_ONE_TOKEN = 0.35
# Batch size of a full pass.
_MAX_ROWS = 128
# Passes of the draft in a proposal.
_NUM_DRAFTS = 4


@dataclass
class Calibration:
    """Runs and times the passes; ``before_full_pass`` is ``AdapterSwitch.before_pass``."""

    speculator: SpeculatorV1
    config: ResolvedConfig
    target: Any
    runner: Any
    block_sizes: list[int]
    num_blocks: int
    before_full_pass: Callable[[list[str], list[int]], None] | None = None

    def __post_init__(self) -> None:
        self._retrieval = self.speculator.level2
        self._vllm_config = self.runner.vllm_config
        self._length = self.config.num_speculative_tokens
        max_context = self._vllm_config.model_config.max_model_len - self._length - 2
        num_tokens = (self.num_blocks - 2) * min(self.block_sizes)
        self._max_context = max(1, min(max_context, num_tokens))
        self._context = min(self.config.calibration_context, self._max_context)
        # Steps are compared with these seconds, hence no minimum.
        self._timer = PassTimer(_REPEATS, statistics.median)

    def run(self) -> Measurements:
        scheduler = self._vllm_config.scheduler_config
        max_reqs = min(scheduler.max_num_seqs, self.config.max_speculating_seqs)
        full = measure_full_passes(
            self._timer,
            self._full_pass,
            min(scheduler.max_num_batched_tokens, _MAX_ROWS),
            *self._full_pass_shapes(),
        )
        draft = draft_per_row = 0.0
        if (model := self.speculator.level1.model) is not None:
            draft, draft_per_row = measure_draft(partial(self._draft, model), max_reqs)
        return Measurements(
            *full,
            *self._level2_passes(min(4, max_reqs)),
            draft,
            draft_per_row,
            self._test_per_token(),
        )

    def _level2_passes(self, num_rows: int) -> tuple[Points, list[tuple[float, Points]]]:
        """Measure ``level2_by_tokens`` and ``level2_by_batch`` of ``Measurements``.

        They are 0 seconds where level 2 takes no part.
        """
        context = float(self._context)
        if self._retrieval is None:
            return [(1.0, 0.0)], [(1.0, [(context, 0.0)])]
        max_tokens = self._length + 1  # limit of the tables of ``_batch()``
        tokens = sorted({min(q, max_tokens) for q in (1, 3, 8, max_tokens)})
        measured = [self._level2(1, q) for q in tokens]
        # Nor do more tokens take less.
        by_tokens = dict(zip(tokens, np.minimum.accumulate(measured[::-1])[::-1].tolist()))
        one_s = by_tokens[tokens[0]]
        by_batch = [(1.0, [(context, one_s)])]
        if num_rows > 1:
            num_tokens = min(3, max_tokens)
            added_s = self._level2(num_rows, num_tokens) - by_tokens[num_tokens]
            by_batch.append((float(num_rows), [(context, one_s + max(0.0, added_s))]))
        return list(by_tokens.items()), by_batch

    def _longest_pass(self) -> tuple[int, float]:
        """Choose the longest context of full passes, from passes of most tokens at two others.

        Returns:
            The context, and the expected seconds of its pass of most tokens.
        """
        near, far = (min(c, self._max_context) for c in (NO_CONTEXT, _PROBED_CONTEXT))
        runs = {c: partial(self._full_pass, 1, self._length + 1, c) for c in (near, far)}
        # All ranks must run the same passes.
        timer = replace(self._timer, repeats=1)
        seconds = broadcast_from_first_rank(timer.all_seconds(runs))
        if far == self._max_context:
            return far, seconds[far]
        per_token = max(1e-9, seconds[far] - seconds[near]) / (far - near)
        room = (_LONGEST_PASS * _MAX_SECONDS - seconds[near]) / per_token
        context = int(max(far, min(room, self._max_context)))
        return context, seconds[near] + (context - near) * per_token

    def _full_pass_shapes(self) -> tuple[list[int], list[int]]:
        """Return lengths and contexts of full passes, as many lengths as fit the time budget.

        A pass is assumed to take a tenth of its seconds without context, and the rest in proportion
        to its context. That of most tokens takes ``slowest`` seconds at the ``longest`` context.
        """
        longest, slowest = self._longest_pass()
        between = [c for c in _CONTEXTS if c < longest]
        for count in range(len(_TOKENS), 0, -1):
            tokens = sorted({*(q for q in _TOKENS[:count] if q <= self._length), self._length + 1})
            inner = between if count > _FEW_LENGTHS else []
            contexts = [min(NO_CONTEXT, longest - 1), *inner, longest]
            shares = sum(_ONE_TOKEN + (1 - _ONE_TOKEN) * q / tokens[-1] for q in tokens)
            shares *= sum(0.1 + 0.9 * c / longest for c in contexts)
            if slowest * (1 + _REPEATS) * shares < _MAX_SECONDS:
                break
        return tokens, contexts

    def _tables(self, num_rows: int, num_tokens: int, block_size: int) -> list[np.ndarray]:
        """Make block tables without vLLM's null block, 0: num_rows * [width], int32."""
        width = -(-num_tokens // block_size) + 1
        ids = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
        return list(1 + ids % (self.num_blocks - 1))

    def _full_pass(self, num_rows: int, num_tokens: int, context: int) -> None:
        context = min(context, self._max_context)
        feed, positions = [[0] * num_tokens] * num_rows, [context] * num_rows
        inputs = PassInput.from_rows(feed, positions)
        metadata: dict = {}
        slots: dict[str, torch.Tensor] = {}
        for groups, block_size in zip(self.runner.attn_groups, self.block_sizes):
            tables = self._tables(num_rows, context + num_tokens, block_size)
            mapping = inputs.slot_mapping(tables, block_size)
            table = torch.from_numpy(np.stack(tables))
            common = inputs.common_metadata(table, mapping)
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
                slots |= dict.fromkeys(group.layer_names, mapping)
        if self.before_full_pass is not None:
            self.before_full_pass(
                [f"calibration {row}" for row in range(num_rows)], [num_tokens] * num_rows
            )
        more = target_inputs(self.target, self._vllm_config, inputs.token_ids, inputs.positions)
        hidden, _ = run_model(self.target, self._vllm_config, inputs, metadata, slots, **more)
        self.target.compute_logits(hidden)

    def _level2(self, num_rows: int, num_tokens: int) -> float:
        """Measure a pass of level 2 over a context that is larger than the budget.

        One of ``TOKENS_PER_SELECTION`` passes selects, as where each pass adds one token.
        """
        batch, proposal = self._batch(num_rows)
        level2, rows = self._retrieval, list(range(num_rows))
        assert level2 is not None
        level2.begin(batch)
        drafts = [[0] * (num_tokens - 1)] * num_rows

        def run(selects: bool) -> None:
            if selects and level2.pass_selection is not None:
                level2.pass_selection.renew()
            level2.forward(batch, proposal, rows, drafts)

        runs = {selects: partial(run, selects) for selects in (True, False)}
        seconds = self._timer.all_seconds(runs)
        for request_id in batch.request_ids:
            level2.cache.release(request_id)
        return seconds[False] + (seconds[True] - seconds[False]) / TOKENS_PER_SELECTION

    def _draft(self, model: DraftSource, num_rows: int) -> float:
        """Measure a pass of the draft model."""
        batch, proposal = self._batch(num_rows)
        model.prepare_dummy(batch)
        rows, counts = list(range(num_rows)), [_NUM_DRAFTS] * num_rows
        matches, noise = model.find_matches(batch, proposal, rows), self.speculator.noise
        seconds = self._timer.seconds(
            model.draft, batch, proposal, rows, counts, matches, batch.sampling, noise
        )
        for request_id in batch.request_ids:
            self.speculator.level1.release(request_id)
        return seconds / _NUM_DRAFTS

    def _test_per_token(self) -> float:
        """Measure the seconds of a further sampled draft token in level 3's test."""
        sampling: Any = SimpleNamespace(
            all_greedy=False, all_random=True, temperature=torch.ones(1), generators={}
        )
        vocab_size = self._vllm_config.model_config.get_vocab_size()

        def run(count: int) -> None:
            ids, logits = torch.zeros(count, dtype=torch.int32), torch.zeros(count, vocab_size)
            ends, bonus = torch.tensor([count], dtype=torch.int32), ids[None, :1]
            acceptance_probs(ids, None, logits, False)
            rejection_sample(ids, [count], count, ends, None, logits, bonus, sampling)

        lengths = sorted({1, self._length})
        seconds = self._timer.all_seconds({n: partial(run, n) for n in lengths})
        return max(0.0, seconds[lengths[-1]] - seconds[1]) / max(1, lengths[-1] - 1)

    def _batch(self, num_rows: int) -> tuple[DraftBatch, Proposal]:
        """Make a batch of dummy requests."""
        context = self._context
        tables = [
            self._tables(num_rows, context + self._length + 1, block_size)
            for block_size in self.block_sizes
        ]
        batch = DraftBatch(
            request_ids=[f"calibration {row}" for row in range(num_rows)],
            token_ids=[np.zeros(context + 1, dtype=np.int32)] * num_rows,
            num_computed_tokens=[context] * num_rows,
            # The tables must reach as far as the longest pass that is measured.
            max_num_tokens=[self._length + 1] * num_rows,
            block_tables=tables,
            sampling=SamplingRows(torch.zeros(num_rows)),
        )
        return batch, Proposal.empty(num_rows)


def broadcast_from_first_rank(value):
    """Return the first rank's value on every rank of the tensor-parallel group.

    Ranks must decide alike, so they use one rank's measured times.
    """
    group = get_tp_group()
    return value if group.world_size == 1 else group.broadcast_object(value, src=0)
