"""What a policy of the lab is: CONTRIBUTING.md tells how to add one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_triforce.config import TriForceConfig
from vllm_triforce_bench.lab.trace import LayerTrace


@dataclass(frozen=True)
class Sizes:
    """What a policy may read, and how often it may choose.

    Raises:
        ValueError: a combination that level 2 would refuse (``TriForceConfig.resolve``), or a
            value that is out of range.
    """

    budget: int = 4096
    """Tokens, the first chunk and the recent ones included."""
    chunk_size: int = 32
    """Tokens that are kept or dropped together; policies by token take no notice."""
    recent_tokens: int | None = None
    """Newest tokens kept whatever their scores; None is level 2's default, about a quarter."""
    refresh_interval: int = 8
    """Full passes between two selections, as at level 2."""
    tokens_per_pass: int = 7
    """Tokens that a full pass moves on by: 7 is six accepted ones and the bonus token."""

    def __post_init__(self) -> None:
        if self.tokens_per_pass < 1:
            raise ValueError(f"tokens_per_pass={self.tokens_per_pass} must be at least 1")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size={self.chunk_size} must be at least 1")
        config = TriForceConfig(
            retrieval_budget=self.budget,
            retrieval_recent_tokens=self.recent_tokens,
            refresh_interval=self.refresh_interval,
        ).resolve(self.chunk_size, is_exact=True)
        object.__setattr__(self, "recent_tokens", config.retrieval_recent_tokens)

    @property
    def budget_chunks(self) -> int:
        return self.budget // self.chunk_size

    @property
    def recent_chunks(self) -> int:
        return self.recent_tokens // self.chunk_size


class LabPolicy(ABC):
    """Chooses which tokens of the context a replayed token reads, per layer and KV head.

    The lab does the rest: it hides what lies ahead, leaves sliding-window layers dense, shows
    everything to a token whose context fits into the budget, and runs the attention.
    """

    name: ClassVar[str]
    needs_mass: ClassVar[bool] = False
    """True where ``LayerTrace.mass`` is read."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @abstractmethod
    def keep(
        self,
        layer: LayerTrace,
        kv_head: int,
        scores: torch.Tensor,  # [group, num_replayed, num_tokens], the sparse pass's; read only
        visible: torch.Tensor,  # [num_replayed, num_tokens], True where a token may look
    ) -> torch.Tensor:  # [1 or group, num_replayed, num_tokens], True where kept
        """What is kept for each replayed token; tokens ahead of it may be anything."""

    def mask(
        self,
        layer: LayerTrace,
        kv_head: int,
        scores: torch.Tensor,  # [group, num_replayed, num_tokens]
        visible: torch.Tensor,  # [num_replayed, num_tokens]
    ) -> torch.Tensor:  # [1 or group, num_replayed, num_tokens]
        """``keep``, and everything where the budget covers the context."""
        covered = layer.positions() < self.sizes.budget
        if bool(covered.all()):
            return visible[None]
        return self.keep(layer, kv_head, scores, visible) | covered[:, None]
