"""Draft model over a window of sink and recent tokens (paper, section 4.1)."""

from typing import ClassVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.core.models import private_cache
from vllm_triforce.kernels.draw import Distributions, LevelLogits, draw_drafts
from vllm_triforce.kernels.nan_guard import NanScrubber
from vllm_triforce.kernels.pass_inputs import (
    PassInputs,
    prepare_draft_inputs,
    prepare_window_inputs,
)
from vllm_triforce.kernels.row_table import RowColumn
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.runner_v2.batch import BatchV2, Slot
from vllm_triforce.runner_v2.passes import ModelPass, forward, graphed_rounds
from vllm_triforce.runner_v2.sampling import SamplingV2, masked_logits, row_masks
from vllm_triforce.runner_v2.sources.source import DraftSourceV2, SourcePartsV2


class DraftModelV2(DraftSourceV2):
    """Draft model that sees sink tokens and recent tokens (paper, section 4.1).

    A token's position in the window follows from its index and the window's start, which only a
    rebuild moves. The host therefore needs no tokens. The first pass of a proposal feeds the
    ``num_speculative_tokens + 1`` newest tokens, which covers all that a full pass can add. The
    first pass of each later round feeds the ``gamma + 1`` newest.
    """

    name = "draft_model"
    keeps_window = True
    reads_states: ClassVar[bool] = False
    """True if the draft reads hidden states beside the tokens, and returns some."""

    @classmethod
    def build(cls, parts: SourcePartsV2) -> "DraftModelV2":
        return cls(parts)

    def __init__(self, parts: SourcePartsV2) -> None:
        context, layers = parts.context, parts.draft_layers
        config, vllm_config, rows = context.config, parts.draft_config, context.rows
        self.cache, builder = private_cache(
            layers, vllm_config, config, rows.max_rows, context.device
        )
        self._attention = parts.draft_attention(layers, builder)
        self._hidden_states = parts.hidden_states
        self._model = parts.draft
        self._rows = rows
        self._context = context
        self._vllm_config = vllm_config
        self._all_token_ids = parts.all_token_ids
        self._num_sinks, self._num_recent = config.num_sink_tokens, config.num_recent_tokens
        self._capacity = config.window_tokens
        # Block tables by row, at a fixed address: a graph is replayed for any slots.
        self._tables = torch.zeros_like(self.cache.block_table)
        self._scrubber = NanScrubber(
            [layer.kv_cache for layer in layers.values()], self.cache.block_size, context.device
        )
        gamma = rows.gamma
        self._first_pass = self._build_pass(rows.num_speculative_tokens + 1, "level 1 first pass")
        self._round_pass = self._first_pass
        if gamma != rows.num_speculative_tokens:
            self._round_pass = self._build_pass(gamma + 1, "level 1 pass of a round")
        self._step_pass = self._build_pass(1, "level 1 step")
        shape = (rows.max_rows, gamma)
        self._logits = torch.zeros(
            *shape, rows.vocab_size, dtype=context.logits_dtype, device=context.device
        )
        self._lse = torch.zeros(shape, dtype=torch.float32, device=context.device)
        self._all_greedy = True
        passes = [self._first_pass, self._round_pass, *([self._step_pass] if gamma > 1 else [])]
        self.passes = list(dict.fromkeys(passes))
        self._rounds = graphed_rounds(self._draft, self.passes, context, "level 1 round")

    def capture(self, mode) -> None:
        for model_pass in self.passes:
            model_pass.capture(mode)
        for graphed_round in self._rounds.values():
            graphed_round.capture(mode)

    @property
    def distributions(self):
        if self._all_greedy:
            return None
        count = self._rows.num_rows
        return Distributions(self._logits[:count], self._lse[:count])

    def begin(self, batch: BatchV2, slots: list[Slot]) -> None:
        """Rebuild windows that are full, or that missed a full pass."""
        stale = []
        growth = self._rows.num_speculative_tokens + self._rows.gamma
        for row, slot in enumerate(slots):
            newest = int(batch.max_computed_tokens[row])
            window_len = self._num_sinks + newest + 1 - slot.window_start + growth
            first = self._first_recent(slot)
            if slot.window_tokens < 0 or window_len > self._capacity or slot.window_start < first:
                slot.window_start = max(first, newest + 1 - self._num_recent)
                stale.append((int(batch.states[row]), slot, newest))
            slot.window_tokens = newest
        if stale:
            self._rebuild(stale)

    def _rebuild(
        self,
        stale: list[tuple[int, Slot, int]],  # state, slot, upper bound of the newest token's index
    ) -> None:
        """Prefill whole windows, a few hundred tokens each; rarely needed.

        An upper bound may lie past a request's newest token. KV that is cached there is
        overwritten before it is read.
        """
        max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        windows: list[tuple[int, int, np.ndarray]] = []
        num_tokens = 0
        for state, slot, newest in stale:
            sinks = np.arange(min(self._num_sinks, newest + 1))
            indices = np.concatenate([sinks, np.arange(slot.window_start, newest + 1)])
            if windows and num_tokens + len(indices) > max_tokens:
                self._prefill(windows)
                windows, num_tokens = [], 0
            windows.append((state, slot.index, indices))
            num_tokens += len(indices)
        self._prefill(windows)

    def _prefill(self, windows: list[tuple[int, int, np.ndarray]]) -> None:
        lens = [len(indices) for _, _, indices in windows]
        device, block_size = self._context.device, self.cache.block_size
        states = np.repeat([state for state, _, _ in windows], lens)
        slots = np.repeat([slot for _, slot, _ in windows], lens)
        indices = np.concatenate([indices for _, _, indices in windows])
        positions = np.concatenate([np.arange(n) for n in lens])
        blocks = slots * self.cache.blocks_per_slot + positions // block_size
        columns = np.stack(
            [states, indices, positions, blocks * block_size + positions % block_size]
        )
        # One copy to the device for all.
        states, indices, positions, slot_mapping = async_tensor_h2d(columns, device)
        starts = np.concatenate([[0], np.cumsum(lens)])
        metadata = self._attention.ragged(
            async_tensor_h2d(starts, device, torch.int32),
            async_tensor_h2d(lens, device, torch.int32),
            self.cache.block_table[async_tensor_h2d([slot for _, slot, _ in windows], device)],
            max(lens),
        )
        inputs = {"input_ids": self._all_token_ids[states, indices], "positions": positions}
        if self._hidden_states is not None:
            slots = slot_mapping // (block_size * self.cache.blocks_per_slot)
            inputs["hidden_states"] = self._hidden_states.before(slots, indices)
            # Ids that stand for an image may lie outside the vocabulary.
            inputs["input_ids"] = inputs["input_ids"].clamp(max=self._rows.vocab_size - 1)
        forward(
            self._model,
            self._vllm_config,
            len(positions),
            inputs,
            metadata,
            dict.fromkeys(self._attention.layer_names, slot_mapping),
        )

    def draft(self, batch, rows, is_first) -> None:
        self._all_greedy = batch.sampling.all_greedy
        self._rounds[batch.sampling.kind](batch.sampling, is_first)

    def _draft(self, sampling: SamplingV2, is_first: bool = True) -> tuple[()]:
        """Launch a round of level 1.

        Args:
            is_first: True to feed all tokens that a full pass can have added. Graphs are captured
                with True: a few more tokens take no longer, and half as many graphs are needed.
        """
        rows, first_pass = self._rows, self._first_pass if is_first else self._round_pass
        if is_first:
            slots = rows.column(RowColumn.SLOT)
            tables = self._tables[: rows.num_rows]
            torch.index_select(self.cache.block_table, 0, slots, out=tables)
        window = self._capacity, self.cache.blocks_per_slot * self.cache.block_size
        num_padded_rows = first_pass.padded_rows(rows.num_rows)
        prepare_window_inputs(
            rows, first_pass.inputs, num_padded_rows, self._all_token_ids, self._num_sinks, *window
        )
        self._prepare_first(first_pass, num_padded_rows)
        self._draw(sampling, first_pass.run(rows.num_rows)[:, -1], 0)
        seq_lens, last_pass = first_pass.inputs.seq_lens, first_pass
        for step in range(1, rows.gamma):
            num_padded_rows = self._step_pass.padded_rows(rows.num_rows)
            self._prepare_step(self._step_pass, last_pass)
            last_pass = self._step_pass
            self._step_pass.inputs.seq_lens[: rows.num_rows].copy_(seq_lens[: rows.num_rows])
            seq_lens = self._step_pass.inputs.seq_lens
            prepare_draft_inputs(rows, self._step_pass.inputs, num_padded_rows, step, *window)
            self._draw(sampling, self._step_pass.run(rows.num_rows)[:, -1], step)
        rows.num_drafted.fill_(rows.gamma)
        return ()

    # For a head; nothing to do for a draft model.

    def _first_recent(self, slot: Slot) -> int:
        """Return the first token that may follow the sinks in a request's window."""
        return self._num_sinks

    def _prepare_first(self, first_pass: ModelPass, num_padded_rows: int) -> None:
        """Prepare further inputs of a round's first pass."""

    def _prepare_step(self, step_pass: ModelPass, last_pass: ModelPass) -> None:
        """Prepare further inputs of a later pass, from the outputs of the pass before."""

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, [num_rows, vocab_size], to which logits processors were applied."""
        return logits

    def end(self, batch: BatchV2, rows: Rows) -> None:
        tables = self._tables[: rows.num_rows]
        self._scrubber(rows, tables, None)

    def _draw(self, sampling: SamplingV2, hidden: torch.Tensor, step: int) -> None:
        """Draw the token of ``step`` for each row from the draft's hidden states."""
        rows, count = self._rows, self._rows.num_rows
        logits = self._model.compute_logits(hidden)
        if sampling.has_processors:
            logits = self._processed(self._context.logits_processing.apply(logits, step))
        logits = logits.to(self._context.logits_dtype)
        top, best = logits.max(-1)
        distributions = None
        if not sampling.all_greedy:
            distributions = Distributions(*masked_logits(logits, *row_masks(sampling, rows)))
            self._logits[:count, step].copy_(distributions.logits)
            self._lse[:count, step].copy_(distributions.lse)
        draft = LevelLogits(best, top, distributions)
        draw_drafts(rows, step, draft, self._context.sampler)

    def _build_pass(self, query_len: int, name: str) -> ModelPass:
        vllm_config, max_rows = self._vllm_config, self._rows.max_rows
        capacity = self.cache.blocks_per_slot * self.cache.block_size
        draft_config = vllm_config.speculative_config.draft_model_config
        hidden = (draft_config.get_hidden_size(), draft_config.dtype) if self.reads_states else None
        inputs = PassInputs(max_rows, query_len, max_rows, self._context.device, hidden)

        def metadata(num_rows: int) -> dict:
            seq_lens, tables = inputs.seq_lens[:num_rows], self._tables[:num_rows]
            return self._attention.uniform(num_rows, query_len, seq_lens, tables, capacity)

        def slots(num_rows: int) -> dict[str, torch.Tensor]:
            mapping = inputs.slot_mapping[: num_rows * query_len]
            return dict.fromkeys(self._attention.layer_names, mapping)

        return ModelPass(
            self._model,
            vllm_config,
            inputs,
            draft_config,
            metadata,
            slots,
            name,
            num_states=self.reads_states,
        )
