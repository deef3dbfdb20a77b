"""What an engine with TriForce runs with: nothing is left open, and sizes are whole KV blocks."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResolvedConfig:
    """Made by ``TriForceConfig.resolve()``, where each key is described; goes to the workers as
    JSON."""

    num_speculative_tokens: int
    gamma: int
    levels: str
    adapts: str
    """What the controller chooses, separated by commas."""
    block_size: int
    """Tokens in one of vLLM's KV blocks, which is a retrieval chunk."""
    retrieval_budget: int
    retrieval_recent_tokens: int
    selection: str
    refresh_interval: int
    num_sink_tokens: int
    num_recent_tokens: int
    min_context: int
    draft_sources: str
    """Where level 1's tokens come from, separated by commas, the preferred one first."""
    prompt_lookup_max: int
    max_speculating_seqs: int
    kv_offload_gib: float | None
    kv_offload_overlap: bool
    log_interval: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ResolvedConfig":
        """What ``to_dict()`` gave."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is ever speculated on."""
        return self.levels == "3"

    @property
    def uses_level2(self) -> bool:
        """Whether anything is retrieved."""
        return "2" in self.levels.split(",")

    @property
    def max_batch(self) -> int:
        """Requests of a step behind which anybody is speculated on, on Runner V2: larger batches
        are bound by arithmetic, and the queries of all their requests take memory."""
        return max(256, 4 * self.max_speculating_seqs)

    @property
    def policy(self) -> str:
        """By which blocks are selected: by one that keeps no summaries where nothing retrieves."""
        return self.selection if self.uses_level2 else "streaming"

    @property
    def adaptive_keys(self) -> frozenset[str]:
        """What the controller chooses, of ``lengths.CHOICES``."""
        return frozenset(filter(None, self.adapts.split(",")))

    @property
    def sources(self) -> tuple[str, ...]:
        """Of level 1's tokens, the preferred one first."""
        return tuple(filter(None, self.draft_sources.split(",")))

    @property
    def budget_blocks(self) -> int:
        """That level 2 reads: the first, the selected and the recent ones."""
        return self.retrieval_budget // self.block_size

    @property
    def recent_blocks(self) -> int:
        """That it reads whatever their scores."""
        return self.retrieval_recent_tokens // self.block_size

    @property
    def max_growth(self) -> int:
        """Tokens by which a context grows between two selections at most."""
        return self.refresh_interval * (self.num_speculative_tokens + 1)

    @property
    def table_width(self) -> int:
        """Blocks that level 2 reads of a request at most: the budget, and what grows behind it."""
        reach = self.max_growth + 2 * (self.num_speculative_tokens + 1) + self.gamma
        return self.budget_blocks + -(-reach // self.block_size) + 2

    @property
    def window_tokens(self) -> int:
        """Tokens of level 1's private cache."""
        return window_tokens(
            self.num_sink_tokens, self.num_recent_tokens, self.num_speculative_tokens, self.gamma
        )


def window_tokens(num_sink: int, num_recent: int, num_proposed: int, gamma: int) -> int:
    """Sinks, recent tokens and room to grow before the window is rebuilt: half of the recent
    tokens, so that a rebuild is rare."""
    return num_sink + num_recent + max(num_recent // 2, num_proposed + gamma + 2)
