"""Level 1's windows, read whole by the draft model (paper, section 4.1).

``runner_v1/sources/draft_model.py`` on the device (paper, section 4.1).
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.cache.streaming import StreamingCache
from vllm_triforce.core.draft_cache import private_cache
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.draw import ExponentialSampler, draw_drafts
from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.pass_inputs import (
    WindowLayout,
    prepare_draft_inputs,
    prepare_window_inputs,
)
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import (
    CAPTURED_SAMPLING,
    BatchV2,
    Masks,
    RowLogitsProcessor,
    SamplingV2,
)
from vllm_triforce.runner_v2.passes import GraphedRound, ModelPass, forward
from vllm_triforce.runner_v2.sampling import masked_logits
from vllm_triforce.runner_v2.slots import Slot
from vllm_triforce.runner_v2.sources.source import DraftSourceV2, SourcePartsV2


class WindowRebuild:
    """Feeds whole windows to the draft: a prefill of a few hundred tokens, rare.

    Args:
        ragged: from (query_start_loc, seq_lens, block table, longest) to metadata by layer.
        max_tokens: of one pass.
    """

    def __init__(
        self,
        model,
        vllm_config,
        cache: StreamingCache,
        layer_names: list[str],
        ragged: Callable,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._cache = cache
        self._layer_names = layer_names
        self._ragged = ragged
        self._max_tokens = max_tokens
        self._device = device

    def __call__(
        self,
        num_sinks: int,
        stale: list[tuple[int, Slot, int]],  # state, slot, index of the newest token at most
        all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], int32
    ) -> None:
        """Tokens behind a request's real end are fed too; others take their places in time."""
        windows = []
        for state, slot, newest in stale:
            sinks = np.arange(min(num_sinks, newest + 1))
            indices = np.concatenate([sinks, np.arange(slot.window_start, newest + 1)])
            windows.append((state, slot.index, indices))
        while windows:
            total, count = 0, 0
            while count < len(windows) and (
                not count or total + len(windows[count][2]) <= self._max_tokens
            ):
                total += len(windows[count][2])
                count += 1
            self._run(windows[:count], all_token_ids)
            windows = windows[count:]

    def _run(self, windows, all_token_ids: torch.Tensor) -> None:
        lens = [len(indices) for _, _, indices in windows]
        states = np.repeat([state for state, _, _ in windows], lens)
        slots = np.repeat([slot for _, slot, _ in windows], lens)
        indices = np.concatenate([indices for _, _, indices in windows])
        positions = np.concatenate([np.arange(n) for n in lens])
        size = self._cache.block_size
        blocks = slots * self._cache.blocks_per_slot + positions // size
        row_metadata = np.stack([states, indices, positions, blocks * size + positions % size])
        states, indices, positions, places = async_tensor_h2d(row_metadata, self._device)
        starts = np.concatenate([[0], np.cumsum(lens)])
        metadata = self._ragged(
            async_tensor_h2d(starts, self._device, torch.int32),
            async_tensor_h2d(lens, self._device, torch.int32),
            self._cache.block_table[async_tensor_h2d([w[1] for w in windows], self._device)],
            max(lens),
        )
        forward(
            self._model,
            self._vllm_config,
            all_token_ids[states, indices],
            positions,
            metadata,
            dict.fromkeys(self._layer_names, places),
        )


class DraftModelV2(DraftSourceV2):
    """A draft model that sees sink tokens and recent tokens (paper, section 4.1).

    Positions in the window follow from a token's index and the window's start, which only a
    rebuild moves. The host therefore never needs the tokens: the first pass of a proposal feeds
    the ``num_speculative_tokens + 1`` newest, which covers all that the full pass can have added,
    and the first pass of each later round the ``gamma + 1`` newest.

    Args:
        make_pass: from (query_len, name) to a pass of the draft over ``cache``.
        rebuild: runs the draft over whole windows.
        tables: [num_rows, blocks per window], int32, block tables that the passes read; each
            proposal writes its rows' own.
    """

    name = "draft_model"
    keeps_window = True

    @classmethod
    def build(cls, parts: SourcePartsV2) -> "DraftModelV2":
        config, vllm_config, device = parts.config, parts.vllm_config, parts.device
        layers = parts.draft_layers
        cache, builder = private_cache(layers, vllm_config, config, parts.num_slots, device)
        attention = parts.draft_attention(layers, builder)
        # A row's blocks stay where they are, row by row: a graph may be replayed for any slots.
        tables = torch.zeros_like(cache.block_table)
        return cls(
            parts.draft,
            _passes(parts, attention, tables, cache.blocks_per_slot * cache.block_size),
            WindowRebuild(
                parts.draft,
                vllm_config,
                cache,
                attention.layer_names,
                attention.ragged,
                vllm_config.scheduler_config.max_num_batched_tokens,
                device,
            ),
            cache,
            tables,
            config.num_sink_tokens,
            config.num_recent_tokens,
            config.window_tokens,
            parts.rows,
            parts.vocab_size,
            parts.logits_dtype,
            parts.race,
            NanScrubber([layer.kv_cache for layer in layers.values()], cache.block_size, device),
            parts.all_token_ids,
            parts.shaping,
            vllm_config,
        )

    def __init__(
        self,
        model: torch.nn.Module,
        make_pass: Callable[[int, str], ModelPass],
        rebuild: WindowRebuild,
        cache: StreamingCache,
        tables: torch.Tensor,
        num_sinks: int,
        num_recent: int,
        capacity: int,
        rows: Rows,
        vocab_size: int,
        logits_dtype: torch.dtype,
        race: ExponentialSampler,
        cleaner: NanScrubber,
        all_token_ids: torch.Tensor,
        shaping: RowLogitsProcessor,
        vllm_config,
    ) -> None:
        self._model = model
        self._rebuild = rebuild
        self._cleaner = cleaner
        self.cache = cache
        self._tables = tables
        self._num_sinks, self._num_recent, self._capacity = num_sinks, num_recent, capacity
        self._rows = rows
        self._race = race
        device = rows.row_metadata.device
        gamma, most = rows.gamma, rows.max_rows
        self._catch_up = make_pass(rows.num_speculative_tokens + 1, "level 1 first pass")
        self._first = self._catch_up
        if gamma != rows.num_speculative_tokens:
            self._first = make_pass(gamma + 1, "level 1 pass of a round")
        self._step = make_pass(1, "level 1 step") if gamma > 1 else None
        self._logits_dtype = logits_dtype
        self._logits = torch.zeros(most, gamma, vocab_size, dtype=logits_dtype, device=device)
        self._lse = torch.zeros(most, gamma, dtype=torch.float32, device=device)
        self._all_greedy = True
        self._all_token_ids = all_token_ids
        self._shaping = shaping
        passes = [its for its in (self._catch_up, self._first, self._step) if its is not None]
        self._passes = list(dict.fromkeys(passes))
        self._rounds = {
            sampling.kind: GraphedRound(
                self._draft,
                sampling,
                rows,
                self._passes,
                vllm_config,
                device,
                f"level 1 round, {sampling.kind}",
            )
            for sampling in CAPTURED_SAMPLING
        }

    def capture(self, mode) -> None:
        for model_pass in self._passes:
            model_pass.capture(mode)
        for work in self._rounds.values():
            work.capture(mode)

    @property
    def distributions(self):
        if self._all_greedy:
            return None
        count = self._rows.num_rows
        return Distributions(self._logits[:count], self._lse[:count])

    def begin(self, batch: BatchV2, slots: list[Slot]) -> None:
        """Rebuilds the windows that are full, or that missed a full pass."""
        stale = []
        growth = self._rows.num_speculative_tokens + self._rows.gamma
        for row, slot in enumerate(slots):
            newest = int(batch.max_computed_tokens[row])
            grown = self._num_sinks + newest + 1 - slot.window_start + growth
            if slot.window_tokens < 0 or grown > self._capacity:
                slot.window_start = max(self._num_sinks, newest + 1 - self._num_recent)
                stale.append((int(batch.states[row]), slot, newest))
            slot.window_tokens = newest
        if stale:
            self._rebuild(self._num_sinks, stale, batch.all_token_ids)

    def draft(self, batch, rows, is_first) -> None:
        self._all_greedy = batch.sampling.all_greedy
        self._rounds[batch.sampling.kind](batch.sampling, is_first)

    def _draft(self, sampling: SamplingV2, is_first: bool = True) -> tuple[()]:
        """
        Args:
            is_first: feeds all that a full pass can have added. Graphs always do: some tokens more
                of a few rows take as long, and there are half as many graphs.
        """
        rows, first = self._rows, self._catch_up if is_first else self._first
        if is_first:
            slots = rows.column(RowColumn.SLOT)
            tables = self._tables[: rows.num_rows]
            torch.index_select(self.cache.block_table, 0, slots, out=tables)
        window = WindowLayout(self._capacity, self.cache.block_size, self.cache.blocks_per_slot)
        padded = first.padded_rows(rows.num_rows)
        prepare_window_inputs(
            rows, first.inputs, padded, self._all_token_ids, self._num_sinks, window
        )
        self._draw(sampling, first.run(rows.num_rows)[:, -1], 0)
        lengths = first.inputs.seq_lens
        for step in range(1, rows.gamma):
            padded = self._step.padded_rows(rows.num_rows)
            self._step.inputs.seq_lens[: rows.num_rows].copy_(lengths[: rows.num_rows])
            lengths = self._step.inputs.seq_lens
            prepare_draft_inputs(rows, self._step.inputs, padded, step, window)
            self._draw(sampling, self._step.run(rows.num_rows)[:, -1], step)
        rows.num_drafted.fill_(rows.gamma)
        return ()

    def clean(self, batch: BatchV2, rows: Rows) -> None:
        tables = self._tables[: rows.num_rows]
        self._cleaner(rows, tables, None)

    def _draw(self, sampling: SamplingV2, hidden: torch.Tensor, step: int) -> None:
        rows, count = self._rows, self._rows.num_rows
        logits = self._model.compute_logits(hidden)
        if sampling.is_shaped:
            logits = self._shaping.shape(logits, step)
        logits = logits.to(self._logits_dtype)
        top, best = logits.max(-1)
        distributions = None
        if not sampling.all_greedy:
            distributions = Distributions(*masked_logits(logits, Masks(sampling, rows)))
            self._logits[:count, step].copy_(distributions.logits)
            self._lse[:count, step].copy_(distributions.lse)
        draft = LevelLogits(best, top, distributions)
        draw_drafts(rows, step, draft, self._race)


def _passes(parts: SourcePartsV2, attention, tables, capacity: int):
    """From (query_len, name) to a pass of the draft over its cache.

    Args:
        tables: [num_rows, blocks per window], int32, block tables that the passes read.
        capacity: tokens of a window at most.
    """
    draft_config = parts.vllm_config.speculative_config.draft_model_config

    def make_pass(query_len: int, name: str) -> ModelPass:
        def metadata(num_rows: int) -> dict:
            seq_lens = made.inputs.seq_lens[:num_rows]
            return attention.uniform(num_rows, query_len, seq_lens, tables[:num_rows], capacity)

        def slots(num_rows: int) -> dict[str, torch.Tensor]:
            mapping = made.inputs.slot_mapping[: num_rows * query_len]
            return dict.fromkeys(attention.layer_names, mapping)

        made = ModelPass(
            parts.draft,
            parts.vllm_config,
            parts.num_slots,
            query_len,
            parts.num_slots,
            draft_config.get_hidden_size(),
            draft_config.dtype,
            parts.device,
            metadata,
            slots,
            name,
        )
        return made

    return make_pass
