"""Retrieval budget of a context: a share of it between two limits, which may be equal."""

from dataclasses import dataclass

# Blocks of context for each block of the budget, between the limits.
CONTEXT_SHARE = 8


@dataclass(frozen=True)
class RetrievalBudget:
    """Blocks that level 2 reads, by the length of the context.

    Args:
        min_blocks, max_blocks: limits that include the first block and the recent ones.
        recent: newest full blocks, which are always read.
    """

    min_blocks: int
    max_blocks: int
    recent: int

    def of(self, num_blocks: int) -> int:
        """Return the budget of a context of ``num_blocks`` full blocks, which may be shorter."""
        return min(max(self.min_blocks, num_blocks // CONTEXT_SHARE), self.max_blocks)
