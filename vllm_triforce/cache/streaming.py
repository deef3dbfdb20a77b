"""Level 1's window on a request: sink tokens and recent tokens, at positions of its own.

Level 1's private KV cache: a few blocks per request slot, outside vLLM's KV groups.
"""

from collections.abc import Callable

import numpy as np
import torch


class StreamingWindow:
    """Says which tokens a draft must be fed, so that its private cache holds the window.

    The window is ``token_ids[:num_sink_tokens] + token_ids[start:]``, at positions 0, 1, ...
    (StreamingLLM, arXiv 2309.17453). Tokens are appended until it is full; then it is rebuilt
    from the newest tokens with fresh positions. What is cached is compared token by token with
    what should be: rejections, preemption and reuse need no bookkeeping.

    Args:
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
        """Moves the window to the end of ``token_ids``, with room for drafts after it.

        Returns:
            The position of the first token to feed, and the tokens to feed: at least the last.
        """
        total = len(token_ids)
        grown = self.num_sink_tokens + total - self._start + num_drafts
        if grown > self.capacity or total <= self._start:
            self._start = max(self.num_sink_tokens, total - self.num_recent_tokens)
        window = np.concatenate([token_ids[: self.num_sink_tokens], token_ids[self._start :]])
        shared = min(len(window) - 1, len(self._cached))
        differs = np.flatnonzero(window[:shared] != self._cached[:shared])
        keep = int(differs[0]) if len(differs) else shared
        self._cached = window
        return keep, window[keep:]

    def num_uncached_tokens(self, num_tokens: int) -> int:
        """How many tokens ``advance()`` would give to feed, if none of those cached is rejected."""
        grown = self.num_sink_tokens + num_tokens - self._start
        if grown > self.capacity or num_tokens <= self._start:
            return min(num_tokens, self.num_sink_tokens + self.num_recent_tokens)
        return max(1, grown - len(self._cached))

    def append(self, token_id: int) -> int:
        """A drafted token that is fed back.

        Returns:
            Its position.
        """
        self._cached = np.append(self._cached, np.int32(token_id))
        return len(self._cached) - 1


class StreamingCache:
    """Who owns which blocks of the draft's cache; independent of the context length.

    Args:
        window_tokens: capacity of a window.
        block_size: tokens in a block.
        num_slots: requests that can have a window at a time (``max_num_seqs``).
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
        """The same for the host."""
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, int] = {}

    def slot(self, request_id: str, evict: Callable[[], str] | None = None) -> int:
        """The request's row of ``block_table``, taken on first use.

        Args:
            evict: where no slot is free, names a request whose slot is taken over; its window has
                to be read anew if it comes back.
        """
        if request_id not in self._slots:
            if not self._free and evict is not None:
                self.release(evict())
            self._slots[request_id] = self._free.pop()
        return self._slots[request_id]

    def owners(self) -> list[str]:
        """The requests that have a slot, the longest-standing owner first."""
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
