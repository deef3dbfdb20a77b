"""Level 1's windows, read whole by the draft model (paper, section 4.1)."""

from collections.abc import Callable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_triforce.cache.streaming_cache import StreamingCache
from vllm_triforce.device.model_pass import forward
from vllm_triforce.device.slots import Slot


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
