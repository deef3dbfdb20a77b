"""Level 1's streaming window of sink and recent tokens, and the private KV cache that holds it."""

from collections.abc import Callable

import numpy as np
import torch


class StreamingWindow:
    """Window of one request: the tokens to feed so that the private cache holds it.

    The window is ``token_ids[:num_sink_tokens] + token_ids[start:]``, at positions 0, 1, ...
    (StreamingLLM, arXiv 2309.17453). Tokens are appended until it is full, then it is rebuilt
    from the newest tokens at fresh positions. Cached tokens are compared with those of the window,
    so rejections, preemption and reuse of a slot need no bookkeeping.

    Args:
        num_recent_tokens: newest tokens of a rebuilt window.
        capacity: tokens that the private cache holds.
    """

    def __init__(self, num_sink_tokens: int, num_recent_tokens: int, capacity: int) -> None:
        self.num_sink_tokens = num_sink_tokens
        self.num_recent_tokens = num_recent_tokens
        self.capacity = capacity
        self._start = num_sink_tokens
        self._cached = np.empty(0, dtype=np.int32)

    def advance(
        self,
        token_ids: np.ndarray,  # [num_tokens], int32
        num_drafts: int,
    ) -> tuple[int, np.ndarray]:
        """Move the window to the end of ``token_ids``, with room for drafts after it.

        Returns:
            Position of the first token to feed, and the tokens to feed, which include the last.
        """
        num_tokens = len(token_ids)
        window_len = self.num_sink_tokens + num_tokens - self._start + num_drafts
        if window_len > self.capacity or num_tokens <= self._start:
            self._start = max(self.num_sink_tokens, num_tokens - self.num_recent_tokens)
        window = np.concatenate([token_ids[: self.num_sink_tokens], token_ids[self._start :]])
        num_shared = min(len(window) - 1, len(self._cached))
        mismatches = np.flatnonzero(window[:num_shared] != self._cached[:num_shared])
        num_kept = int(mismatches[0]) if len(mismatches) else num_shared
        self._cached = window
        return num_kept, window[num_kept:]

    def num_uncached_tokens(self, num_tokens: int) -> int:
        """Count the tokens that ``advance()`` would feed if no cached token is rejected."""
        window_len = self.num_sink_tokens + num_tokens - self._start
        if window_len > self.capacity or num_tokens <= self._start:
            return min(num_tokens, self.num_sink_tokens + self.num_recent_tokens)
        return max(1, window_len - len(self._cached))

    def append(self, token_id: int) -> int:
        """Append a drafted token that is fed next, and return its position."""
        self._cached = np.append(self._cached, np.int32(token_id))
        return len(self._cached) - 1


class StreamingCache:
    """Slots of the draft's private KV cache, outside vLLM's KV cache groups.

    A slot has the blocks of one window at any length of the context.

    Args:
        window_tokens: capacity of a window.
        block_size: tokens in a block.
        num_slots: requests that have a window at a time (``max_num_seqs``).
    """

    def __init__(
        self, window_tokens: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.blocks_per_slot = -(-window_tokens // block_size)
        self.num_blocks = num_slots * self.blocks_per_slot
        self.block_table = torch.arange(self.num_blocks, dtype=torch.int32, device=device).view(
            num_slots, self.blocks_per_slot
        )
        self.host_table = self.block_table.cpu().numpy()
        """``block_table`` on the host."""
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, int] = {}

    def slot(self, request_id: str, evict: Callable[[], str] | None = None) -> int:
        """Return the request's row of ``block_table``, taken on first use.

        Args:
            evict: returns a request to release where no slot is free. If that request comes back,
                its window is read again.
        """
        if request_id not in self._slots:
            if not self._free and evict is not None:
                self.release(evict())
            self._slots[request_id] = self._free.pop()
        return self._slots[request_id]

    def owners(self) -> list[str]:
        """List the requests that have a slot, oldest first."""
        return list(self._slots)

    def release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)
