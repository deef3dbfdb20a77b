"""Base class of the lab's policies; CONTRIBUTING.md has the steps to add one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce_bench.lab.trace import LayerTrace


@dataclass(frozen=True)
class Sizes:
    """Sizes of a selection.

    Args:
        budget: tokens read, the first chunk and the recent ones included.
        chunk_size: tokens that are kept or dropped together; unused by policies by token.
        recent_tokens: newest tokens, always kept; None is level 2's default.
        refresh_interval: full passes between two selections, as at level 2; 0 to select in its
            passes.
        tokens_per_pass: tokens of a full pass: 7 is six accepted ones and the bonus token.

    Raises:
        ValueError: level 2 refuses the sizes (``TriForceConfig.resolve``).
    """

    budget: int = 4096
    chunk_size: int = 32
    recent_tokens: int | None = None
    refresh_interval: int = 0
    tokens_per_pass: int = 7
    retrieval_budget: RetrievalBudget = field(init=False)

    def __post_init__(self) -> None:
        config = TriForceConfig(
            retrieval_budget=self.budget,
            retrieval_recent_tokens=self.recent_tokens,  # type: ignore[arg-type]  # None: default
            refresh_interval=self.refresh_interval,
        ).resolve(self.chunk_size, is_exact=True)
        object.__setattr__(self, "recent_tokens", config.retrieval_recent_tokens)
        object.__setattr__(self, "retrieval_budget", config.budget)


class LabPolicy(ABC):
    """Selects the tokens that a replayed token reads, per layer and KV head.

    The lab hides later tokens, leaves sliding-window layers dense, keeps all tokens of a context
    within the budget, and computes the attention.
    """

    name: ClassVar[str]

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @abstractmethod
    def keep(
        self,
        layer: LayerTrace,
        kv_head: int,
        query: torch.Tensor,  # [group, num_replayed, head_dim], of the sparse pass
        scores: torch.Tensor,  # [group, num_replayed, num_tokens], of the same; read only
        visible: torch.Tensor,  # [num_replayed, num_tokens], True for visible tokens
    ) -> torch.Tensor:  # [1 or group, num_replayed, num_tokens], True where kept
        """Mask of the tokens kept for each replayed token; later tokens may have any value."""

    def mask(
        self,
        layer: LayerTrace,
        kv_head: int,
        query: torch.Tensor,  # [group, num_replayed, head_dim]
        scores: torch.Tensor,  # [group, num_replayed, num_tokens]
        visible: torch.Tensor,  # [num_replayed, num_tokens]
    ) -> torch.Tensor:  # [1 or group, num_replayed, num_tokens]
        """``keep()``, or all tokens if the budget covers the context."""
        covered = layer.positions() < self.sizes.budget
        if bool(covered.all()):
            return visible[None]
        return self.keep(layer, kv_head, query, scores, visible) | covered[:, None]
