"""Level 1's window on a request: sink tokens and recent tokens, at positions of its own."""

import numpy as np


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

    def behind(self, num_tokens: int) -> int:
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
