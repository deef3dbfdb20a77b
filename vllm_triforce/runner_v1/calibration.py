"""Measures the passes at start-up, for the controller's cost model (``controller/cost_model.py``).

The passes are the real ones, over the KV cache that was just allocated and holds nothing yet.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_triforce.controller.measurements import Measurements
from vllm_triforce.core.model_pass import PassInput, run_model
from vllm_triforce.core.sampling import SamplingRows
from vllm_triforce.runner_v1.draft_batch import DraftBatch, Proposal
from vllm_triforce.runner_v1.sampling import token_distribution

# Next to no context: what is measured there is the pass without its attention.
_NO_CONTEXT = 16
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class _Grid:
    """Where full passes of one request are measured, and how often."""

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int


# From the finest to the coarsest. Attention kernels work on tiles of queries, so that a token more
# may cost nothing, or a tile, or less than nothing where another kernel takes over.
_GRIDS = (
    _Grid((1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 20, 24, 25, 32, 33), (1024, 4096, 16384), 3),
    _Grid((1, 2, 4, 8, 12, 16, 17, 24, 33), (2048, 16384), 2),
    _Grid((1, 4, 8, 16, 17), (), 1),
    _Grid((1,), (), 1),
)
# Seconds that the full passes may take; a slow model is measured at fewer places.
_MOST_SECONDS = 6.0


class Calibration:
    """The passes that can be measured.

    Args:
        built: the speculator (``runner_v1/build.py``).
        attn_groups: vLLM's attention groups per KV cache group.
        block_sizes: tokens in a block of each KV cache group's block table.
        agree: gives every rank the first rank's value; each rank must run the same passes.
    """

    def __init__(
        self,
        built,
        target,
        vllm_config,
        attn_groups,
        block_sizes: list[int],
        num_blocks: int,
        device: torch.device,
        agree: Callable[[object], object],
    ) -> None:
        self._speculator = built.speculator
        self._target = target
        self._vllm_config = vllm_config
        self._attn_groups = attn_groups
        self._block_sizes = block_sizes
        self._num_blocks = num_blocks
        self._device = device
        self._agree = agree
        config = built.config
        scheduler = vllm_config.scheduler_config
        self._length = config.num_speculative_tokens
        self._budget = config.retrieval_budget
        self._max_rows = min(scheduler.max_num_batched_tokens, 128)
        self._max_reqs = scheduler.max_num_seqs
        room = vllm_config.model_config.max_model_len - self._length - 2
        self._max_context = max(1, min(room, (num_blocks - 2) * min(block_sizes)))

    def run(self) -> Measurements:
        slowest = self._timed(lambda: self._full_pass(1, self._length + 1, self._max_context), 1)
        tokens, contexts, repeats = self._grid(self._agree(slowest))
        rows = [n for n in _ROWS if n <= self._max_rows]
        passes = [(n, 1, _NO_CONTEXT) for n in rows]
        passes += [(1, q, c) for q in tokens for c in contexts]
        seconds = self._all_timed(
            {args: partial(self._full_pass, *args) for args in passes}, repeats
        )
        # More rows take no less: a line through noise would go on to nothing, and below it.
        rising = np.maximum.accumulate([seconds[n, 1, _NO_CONTEXT] for n in rows]).tolist()
        by_rows = list(zip(rows, rising))
        by_tokens = [(q, [(c, seconds[1, q, c]) for c in contexts]) for q in tokens]
        longest = self._length + 1  # what the tables of ``_batch()`` have room for
        level2_tokens = sorted({min(q, longest) for q in (1, 3, 8, longest)})
        level2 = [(q, self._level2(1, q, repeats)) for q in level2_tokens]
        level2_per_row = draft = draft_per_row = draft_per_token = 0.0
        several = min(4, self._max_reqs)
        if several > 1:
            few = min(3, longest)
            more = self._level2(several, few, repeats) - dict(level2)[few]
            level2_per_row = max(0.0, more / (several - 1))
        if self._speculator.level1.model is not None:
            draft = self._draft(1, repeats)
            draft_per_token = self._window(repeats, draft)
            if several > 1:
                draft_per_row = max(0.0, (self._draft(several, repeats) - draft) / (several - 1))
        return Measurements(
            by_rows,
            by_tokens,
            level2,
            level2_per_row,
            draft,
            draft_per_row,
            draft_per_token,
            self._first_selection(repeats),
            self._sampling(32, repeats),
        )

    def _grid(self, slowest: float) -> tuple[list[int], list[int], int]:
        """The finest grid that can be measured in time, if a pass takes its share of ``slowest``
        by its context, and a tenth of it without one."""
        for grid in _GRIDS:
            tokens = sorted({*(q for q in grid.tokens if q <= self._length), self._length + 1})
            inner = [c for c in grid.contexts if _NO_CONTEXT < c < self._max_context]
            contexts = [min(_NO_CONTEXT, self._max_context - 1), *inner, self._max_context]
            shares = sum(0.1 + 0.9 * c / self._max_context for c in contexts)
            if slowest * (grid.repeats + 1) * len(tokens) * shares < _MOST_SECONDS:
                break
        return tokens, contexts, grid.repeats

    def _timed(self, run: Callable[[], object], repeats: int) -> float:
        return self._all_timed({"": run}, repeats)[""]

    def _all_timed(self, runs: dict, repeats: int) -> dict:
        """The fastest of a few runs each, after a first one: what disturbs only makes it slower. In
        turns, so that a disturbance of a moment does not slow all the runs of one."""
        found = {name: float("inf") for name in runs}
        for turn in range(repeats + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if turn:
                    found[name] = min(found[name], time.perf_counter() - start)
        return found

    def _tables(self, num_rows: int, num_tokens: int, block_size: int) -> np.ndarray:
        """[num_rows, width], int32: block 0 is vLLM's null block."""
        width = -(-num_tokens // block_size) + 1
        ids = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
        return 1 + ids % (self._num_blocks - 1)

    def _full_pass(self, num_rows: int, num_tokens: int, context: int) -> None:
        context = min(context, self._max_context)
        feed, positions = [[0] * num_tokens] * num_rows, [context] * num_rows
        inputs = PassInput.from_rows(feed, positions, self._device)
        metadata: dict = {}
        slots: dict[str, torch.Tensor] = {}
        for groups, block_size in zip(self._attn_groups, self._block_sizes):
            tables = self._tables(num_rows, context + num_tokens, block_size)
            table = torch.from_numpy(tables).to(self._device)
            mapping = inputs.slot_mapping(tables, block_size)
            common = inputs.common_metadata(table, mapping)
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata |= dict.fromkeys(group.layer_names, built)
                slots |= dict.fromkeys(group.layer_names, mapping)
        if (before_pass := self._speculator.level2.before_pass) is not None:
            before_pass([f"calibration {row}" for row in range(num_rows)], [num_tokens] * num_rows)
        hidden = run_model(self._target, self._vllm_config, inputs, metadata, slots)
        self._target.compute_logits(hidden)

    def _level2(self, num_rows: int, num_tokens: int, repeats: int) -> float:
        batch, proposal = self._batch(num_rows, min(self._budget, self._max_context))
        level2, rows = self._speculator.level2, list(range(num_rows))
        level2.begin(batch)
        drafted = [[0] * (num_tokens - 1)] * num_rows
        seconds = self._timed(lambda: level2.forward(batch, proposal, rows, drafted), repeats)
        for request_id in batch.request_ids:
            level2.release(request_id)
        return seconds

    def _first_selection(self, repeats: int) -> float:
        """Of a token of context, where level 2 knows nothing of a request."""
        context = min(2 * self._budget, self._max_context)
        batch, _ = self._batch(1, context)
        level2, (request_id,) = self._speculator.level2, batch.request_ids

        def begin():
            level2.release(request_id)
            level2.invalidate_summaries(tuple(tables[0].tolist() for tables in batch.block_tables))
            level2.begin(batch)

        seconds = self._timed(begin, repeats)
        level2.release(request_id)
        return seconds / context

    def _window(self, repeats: int, pass_seconds: float) -> float:
        """Of a token that the draft has to read first.

        Args:
            pass_seconds: of a pass of one token.
        """
        batch, proposal = self._batch(1, min(self._budget, self._max_context))
        model, (request_id,) = self._speculator.level1.model, batch.request_ids
        num_tokens = model.num_uncached_tokens(request_id, len(batch.token_ids[0]))

        def draft():
            model.release(request_id)
            self._ask_draft(batch, proposal, 1)

        seconds = self._timed(draft, repeats)
        model.release(request_id)
        return max(0.0, seconds - pass_seconds) / num_tokens

    def _draft(self, num_rows: int, repeats: int, num_passes: int = 4) -> float:
        batch, proposal = self._batch(num_rows, min(self._budget, self._max_context))
        run = partial(self._ask_draft, batch, proposal, num_passes)
        seconds = self._timed(run, repeats) / num_passes
        for request_id in batch.request_ids:
            self._speculator.level1.release(request_id)
        return seconds

    def _ask_draft(self, batch: DraftBatch, proposal: Proposal, num_tokens: int) -> None:
        model, rows = self._speculator.level1.model, list(range(len(batch)))
        model.draft(
            batch,
            proposal,
            rows,
            [num_tokens] * len(rows),
            model.find_matches(batch, proposal, rows),
            batch.sampling,
            self._speculator.noise,
        )

    def _sampling(self, num_rows: int, repeats: int) -> float:
        """Of one row: top-p, the parameter that costs most, of logits so flat that the vocabulary
        has to be sorted. Too much for most text; what tests really take is learnt."""
        vocab_size = self._vllm_config.model_config.get_vocab_size()
        logits = torch.randn(
            num_rows, vocab_size, device=self._device, generator=torch.Generator(self._device)
        )
        rows = torch.full((num_rows,), 0.9, device=self._device)
        sampling = SamplingRows(temperature=rows, top_p=rows)
        return self._timed(lambda: token_distribution(logits, sampling), repeats) / num_rows

    def _batch(self, num_rows: int, context: int) -> tuple[DraftBatch, Proposal]:
        """Requests that do not exist, of zeros."""
        shape = self._speculator.level2.query_shape
        dtype = self._vllm_config.model_config.dtype
        tables = [
            list(self._tables(num_rows, context + self._length + 1, block_size))
            for block_size in self._block_sizes
        ]
        batch = DraftBatch(
            request_ids=[f"calibration {row}" for row in range(num_rows)],
            token_ids=[np.zeros(context + 1, dtype=np.int32)] * num_rows,
            num_computed_tokens=[context] * num_rows,
            # The tables must reach as far as the longest pass that is measured.
            max_num_tokens=[self._length + 1] * num_rows,
            block_tables=tables,
            queries=[lambda: torch.zeros(shape, dtype=dtype, device=self._device)] * num_rows,
            sampling=SamplingRows(torch.zeros(num_rows, device=self._device)),
        )
        return batch, Proposal.empty(num_rows, greedy=True)


def broadcast_from_first_rank(value):
    """The first rank's value, on every rank of the tensor-parallel group: ranks decide by one
    clock."""
    group = get_tp_group()
    return value if group.world_size == 1 else group.broadcast_object(value, src=0)
