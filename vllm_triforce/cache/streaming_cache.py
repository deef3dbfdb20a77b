"""Level 1's private KV cache: a few blocks per request slot, outside vLLM's KV groups."""

from collections.abc import Callable

import torch


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
