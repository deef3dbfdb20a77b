"""``host/sources/draft_model.py`` on the device (paper, section 4.1)."""

from collections.abc import Callable

import torch

from vllm_triforce.cache.streaming_cache import StreamingCache
from vllm_triforce.core.private_cache import private_cache
from vllm_triforce.device.batch import (
    CAPTURED_SAMPLING,
    DeviceBatch,
    DeviceSampling,
    LogitShaping,
    Masks,
)
from vllm_triforce.device.model_pass import ModelPass
from vllm_triforce.device.row_work import RowWork
from vllm_triforce.device.slots import Slot
from vllm_triforce.device.sources.source import DeviceSource, DeviceSourceParts
from vllm_triforce.device.window_rebuild import WindowRebuild
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.drafting import draw_drafts
from vllm_triforce.kernels.faults import BlockCleaner
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.row_metadata import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.verification.masked_logits import masked_logits


class DeviceDraftModel(DeviceSource):
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
    def build(cls, parts: DeviceSourceParts) -> "DeviceDraftModel":
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
            BlockCleaner([layer.kv_cache for layer in layers.values()], cache.block_size, device),
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
        race: Race,
        cleaner: BlockCleaner,
        all_token_ids: torch.Tensor,
        shaping: LogitShaping,
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
            sampling.kind: RowWork(
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

    def begin(self, batch: DeviceBatch, slots: list[Slot]) -> None:
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

    def _draft(self, sampling: DeviceSampling, is_first: bool = True) -> tuple[()]:
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
        geometry = (self._capacity, self.cache.block_size, self.cache.blocks_per_slot)
        padded = first.padded_rows(rows.num_rows)
        rows.feed_window(first.inputs, padded, self._all_token_ids, self._num_sinks, *geometry)
        self._draw(sampling, first.run(rows.num_rows)[:, -1], 0)
        lengths = first.inputs.seq_lens
        for step in range(1, rows.gamma):
            padded = self._step.padded_rows(rows.num_rows)
            self._step.inputs.seq_lens[: rows.num_rows].copy_(lengths[: rows.num_rows])
            lengths = self._step.inputs.seq_lens
            rows.feed_draft(self._step.inputs, padded, step, *geometry)
            self._draw(sampling, self._step.run(rows.num_rows)[:, -1], step)
        rows.num_drafted.fill_(rows.gamma)
        return ()

    def clean(self, batch: DeviceBatch, rows: Rows) -> None:
        tables = self._tables[: rows.num_rows]
        self._cleaner(rows.faults, rows.num_rows, rows.computed, tables, None)

    def _draw(self, sampling: DeviceSampling, hidden: torch.Tensor, step: int) -> None:
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
        draw_drafts(rows, step, draft, rows.drawing, self._race)


def _passes(parts: DeviceSourceParts, attention, tables, capacity: int):
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
