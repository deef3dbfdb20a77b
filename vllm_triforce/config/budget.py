"""Retrieval budget of a context: a share of it between two limits, which may be equal."""

from dataclasses import dataclass, replace

# Blocks of context for each block of the budget, between the limits.
CONTEXT_SHARE = 8

# Tokens of the largest KV block that is a chunk as a whole.
_MAX_CHUNK = 128


@dataclass(frozen=True)
class RetrievalBudget:
    """Blocks that level 2 reads, by the length of the context."""

    min_blocks: int  # with the first block and the recent ones, as ``max_blocks``
    max_blocks: int
    recent: int  # newest full blocks, which are always read

    def of(self, num_blocks: int) -> int:
        """Return the budget of a context of ``num_blocks`` full blocks, which may be shorter."""
        return min(max(self.min_blocks, num_blocks // CONTEXT_SHARE), self.max_blocks)


def round_up(num_tokens: int, block_size: int) -> int:
    """Round up to whole blocks."""
    return -(-num_tokens // block_size) * block_size


def fit_budget(num_tokens: int, recent: int, block_size: int) -> int:
    """Round a budget up to whole blocks, with room for the first chunk and a retrieved one."""
    return max(recent + 2 * block_size, round_up(num_tokens, block_size))


def chunk_size(block_size: int) -> int:
    """Return the tokens of a retrieval chunk: a KV block, or an equal part of a large one.

    vLLM gives a block hundreds of tokens where other layers keep a recurrent state, which takes a
    block.
    """
    sizes = (block_size,) if block_size <= _MAX_CHUNK else (32, 16, block_size)
    return next(size for size in sizes if block_size % size == 0)


def fit_blocks(config, block_size: int):
    """Return a ``ResolvedConfig`` for KV blocks of another size, its sizes rounded up to blocks.

    vLLM gives layers larger blocks than it was configured with where other layers have longer
    keys, and says so only once the model is loaded.
    """
    recent = round_up(config.retrieval_recent_tokens, block_size)
    return replace(
        config,
        block_size=block_size,
        retrieval_recent_tokens=recent,
        min_retrieval_budget=fit_budget(config.min_retrieval_budget, recent, block_size),
        retrieval_budget=fit_budget(config.retrieval_budget, recent, block_size),
    )
