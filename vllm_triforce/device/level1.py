"""Level 1 on the device: a draft model with a window of its own, or prompt lookup."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.cache.streaming_cache import StreamingCache
from vllm_triforce.device.batch import DeviceBatch
from vllm_triforce.device.model_pass import ModelPass, forward
from vllm_triforce.device.slots import Slot
from vllm_triforce.kernels.distributions import Distributions, LevelLogits
from vllm_triforce.kernels.drafting import draw_drafts
from vllm_triforce.kernels.faults import BlockCleaner
from vllm_triforce.kernels.prompt_lookup import look_up
from vllm_triforce.kernels.race import Race
from vllm_triforce.kernels.rows import Rows
from vllm_triforce.verification.masked_logits import masked_logits


class DeviceLevel1(ABC):
    """What drafts on the device: the draft model with its window, or prompt lookup."""

    @abstractmethod
    def draft(self, batch: DeviceBatch, rows: Rows, is_first: bool) -> None:
        """Writes ``rows.drafted`` and ``rows.num_drafted`` (``rows.gamma`` at most)."""

    def begin(self, batch: DeviceBatch, slots: list[Slot]) -> None:  # noqa: B027
        """Called once a proposal, before its rounds."""

    def clean(self, batch: DeviceBatch, rows: Rows) -> None:  # noqa: B027
        """Called once a proposal, behind its rounds: removes NaN of the rows that have a fault."""

    @property
    def distributions(self) -> Distributions | None:
        """Of what was drafted, ``gamma`` places; None where each token was certain."""
        return None

    def capture(self, mode) -> None:  # noqa: B027
        """Captures CUDA graphs."""


class DevicePromptLookup(DeviceLevel1):
    """Args:
    max_ngram: longest n-gram that is looked up, in tokens.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def draft(self, batch, rows, is_first) -> None:
        most = int(batch.max_computed_tokens.max()) + 1 + rows.num_speculative_tokens
        look_up(rows, batch.all_token_ids, most, self.max_ngram)


class DeviceStreaming(DeviceLevel1):
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

    def __init__(
        self,
        model: torch.nn.Module,
        make_pass: Callable[[int, str], ModelPass],
        rebuild: "WindowRebuild",
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

    def capture(self, mode) -> None:
        for model_pass in {self._catch_up, self._first, self._step} - {None}:
            model_pass.capture(mode)

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
        indices = async_tensor_h2d([slot.index for slot in slots], self._tables.device)
        self._tables[: len(slots)] = self.cache.block_table[indices]
        if stale:
            self._rebuild(self._num_sinks, stale, batch.all_token_ids)

    def draft(self, batch, rows, is_first) -> None:
        self._all_greedy = batch.sampling.all_greedy
        first = self._catch_up if is_first else self._first
        geometry = (self._capacity, self.cache.block_size, self.cache.blocks_per_slot)
        padded = first.padded_rows(rows.num_rows)
        rows.feed_window(first.inputs, padded, batch.all_token_ids, self._num_sinks, *geometry)
        self._draw(batch, first.run(rows.num_rows)[:, -1], 0)
        lengths = first.inputs.seq_lens
        for step in range(1, rows.gamma):
            padded = self._step.padded_rows(rows.num_rows)
            self._step.inputs.seq_lens[: rows.num_rows].copy_(lengths[: rows.num_rows])
            lengths = self._step.inputs.seq_lens
            rows.feed_draft(self._step.inputs, padded, step, *geometry)
            self._draw(batch, self._step.run(rows.num_rows)[:, -1], step)
        rows.num_drafted.fill_(rows.gamma)

    def clean(self, batch: DeviceBatch, rows: Rows) -> None:
        tables = self._tables[: rows.num_rows]
        self._cleaner(rows.faults, rows.num_rows, rows.computed, tables, None)

    def _draw(self, batch: DeviceBatch, hidden: torch.Tensor, step: int) -> None:
        rows, count = self._rows, self._rows.num_rows
        logits = self._model.compute_logits(hidden).to(self._logits_dtype)
        top, best = logits.max(-1)
        distributions = None
        if not self._all_greedy:
            distributions = Distributions(*masked_logits(logits, batch.sampling))
            self._logits[:count, step].copy_(distributions.logits)
            self._lse[:count, step].copy_(distributions.lse)
        draft = LevelLogits(best, top, distributions)
        draw_drafts(rows, step, draft, batch.sampling, self._race)


class WindowRebuild:
    """Feeds whole windows to the draft: a prefill of a few hundred tokens, rare.

    Args:
        ragged: from (query_start_loc, seq_lens, block table, longest) to metadata by layer.
        most_tokens: of one pass.
    """

    def __init__(
        self,
        model,
        vllm_config,
        cache: StreamingCache,
        layer_names: list[str],
        ragged: Callable,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._cache = cache
        self._layer_names = layer_names
        self._ragged = ragged
        self._most_tokens = most_tokens
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
                not count or total + len(windows[count][2]) <= self._most_tokens
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
