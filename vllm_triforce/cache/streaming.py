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
        num_kept = self._num_shared(window, min(len(window) - 1, len(self._cached)))
        self._cached = window
        return num_kept, window[num_kept:]

    def _num_shared(self, window: np.ndarray, limit: int) -> int:
        """Count the first tokens that the window and the cache share, at most ``limit``."""
        mismatches = np.flatnonzero(window[:limit] != self._cached[:limit])
        return int(mismatches[0]) if len(mismatches) else limit

    def append(self, token_id: int) -> int:
        """Append a drafted token that is fed next, and return its position."""
        self._cached = np.append(self._cached, np.int32(token_id))
        return len(self._cached) - 1


class StateWindow(StreamingWindow):
    """Window of a head, which reads each token with the target's state before it.

    It has no sinks, as heads are trained (vllm-project/speculators): the target's states know the
    start of the text. After the first drafted token the head's own output stands in for the state.
    Such tokens are fed again once level 2 has read them, and those of level 2 once a full pass has.
    """

    def __init__(self, num_recent_tokens: int, capacity: int) -> None:
        super().__init__(0, num_recent_tokens, capacity)
        self._num_stated = 0
        """Number of cached tokens with a state of the target."""
        self._num_confirmed = 0
        """Number of cached tokens with a state of a full pass."""
        self._num_computed = -1

    def advance_to(
        self,
        token_ids: np.ndarray,  # [num_tokens], int32
        num_drafts: int,
        num_computed: int,
        first_known: int,
    ) -> tuple[int, int]:
        """Move the window to the end of ``token_ids``, with room for drafts after it.

        Args:
            num_computed: tokens that full passes have read.
            first_known: first position whose state is known. The token after it is the first that
                the window may hold.

        Returns:
            Position of the first token to feed, and its place in ``token_ids``.
        """
        num_tokens, start = len(token_ids), self._start
        if num_tokens - start + num_drafts > self.capacity or not first_known < start < num_tokens:
            start = max(first_known + 1, num_tokens - self.num_recent_tokens)
        window = token_ids[start:]
        num_kept = min(self._num_stated, len(window) - 1) if start == self._start else 0
        if num_computed != self._num_computed:
            num_kept = min(num_kept, self._num_confirmed)
        num_kept = self._num_shared(window, num_kept)
        self._start, self._cached, self._num_computed = start, window, num_computed
        self._num_stated = len(window)
        self._num_confirmed = max(0, num_computed + 1 - start)
        return num_kept, start + num_kept


class StreamingCache:
    """Slots of the draft's private KV cache, outside vLLM's KV cache groups.

    A slot has the blocks of one window at any length of the context.

    Args:
        window_tokens: capacity of a window.
        block_size: tokens in a block.
        num_slots: requests that have a window at a time.
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
