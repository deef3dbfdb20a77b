"""Config of a running engine: every key has a value, and sizes are whole KV blocks."""

import dataclasses
from dataclasses import dataclass

from vllm_triforce.config.keys import Keys


@dataclass(frozen=True)
class ResolvedConfig(Keys):
    """Result of ``TriForceConfig.resolve()``; goes to the workers as JSON."""

    block_size: int = dataclasses.field(kw_only=True)
    """Tokens in one of vLLM's KV blocks, which is a retrieval chunk."""

    @property
    def uses_level2(self) -> bool:
        """True if level 2 takes part."""
        return "2" in self.levels.split(",")

    @property
    def max_batch(self) -> int:
        """Maximum requests of a step with speculation, on Runner V2.

        Larger batches are bound by arithmetic, and recording their queries takes memory.
        """
        return max(256, 4 * self.max_speculating_seqs)

    @property
    def policy(self) -> str:
        """Selection policy; without level 2 one that keeps no summaries."""
        return self.selection if self.uses_level2 else "streaming"

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of drafts, the preferred one first."""
        return tuple(filter(None, self.draft_sources.split(",")))

    @property
    def budget_blocks(self) -> int:
        """Blocks that level 2 reads: the first, the selected and the recent ones."""
        return self.retrieval_budget // self.block_size

    @property
    def recent_blocks(self) -> int:
        """Newest blocks that level 2 always reads."""
        return self.retrieval_recent_tokens // self.block_size

    @property
    def max_growth(self) -> int:
        """Maximum tokens by which a context grows between two selections."""
        return self.refresh_interval * (self.num_speculative_tokens + 1)

    @property
    def table_width(self) -> int:
        """Maximum blocks that level 2 reads of a request: the budget and the growth after it."""
        growth = self.max_growth + 2 * (self.num_speculative_tokens + 1) + self.gamma
        return self.budget_blocks + -(-growth // self.block_size) + 2
