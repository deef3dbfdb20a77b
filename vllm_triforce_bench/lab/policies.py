"""Policies that serve, and those of the lab alone; CONTRIBUTING.md has the steps to add one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from vllm_triforce import selection
from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.selection import SelectionPolicy
from vllm_triforce_bench.lab.trace import LayerTrace


@dataclass(frozen=True)
class Sizes:
    """Sizes of a selection.

    Args:
        budget: tokens read, the first chunk and the recent ones included.
        chunk_size: tokens that are kept or dropped together; unused by policies by token.
        recent_tokens: newest tokens, always kept; None is level 2's default.
        tokens_per_pass: tokens of a full pass: 7 is six accepted ones and the bonus token.

    Raises:
        ValueError: level 2 refuses the sizes (``TriForceConfig.resolve``).
    """

    budget: int = 4096
    chunk_size: int = 32
    recent_tokens: int | None = None
    tokens_per_pass: int = 7
    retrieval_budget: RetrievalBudget = field(init=False)

    def __post_init__(self) -> None:
        config = TriForceConfig(
            retrieval_budget=self.budget,
            retrieval_recent_tokens=self.recent_tokens,  # type: ignore[arg-type]  # None: default
        ).resolve(self.chunk_size)
        if config.retrieval_budget != self.budget:
            raise ValueError(
                f"budget={self.budget} does not fit chunks of {self.chunk_size} tokens: it must be "
                "a multiple, with room for the first chunk, one retrieved chunk and "
                f"{config.retrieval_recent_tokens} recent tokens. Use {config.retrieval_budget}."
            )
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

    def mask(self, layer: LayerTrace, kv_head: int, query, scores, visible) -> torch.Tensor:
        """``keep()``, or all tokens if the budget covers the context."""
        covered = layer.positions() < self.sizes.budget
        if bool(covered.all()):
            return visible[None]
        return self.keep(layer, kv_head, query, scores, visible) | covered[:, None]


class Full(LabPolicy):
    """No selection: with it the loss is the copy's alone.

    Mechanism: every query head reads all tokens. Without a copy (``--copies``) it is the reference
    itself.
    Parameters: none.
    """

    name = "full"

    def keep(self, layer, kv_head, query, scores, visible):
        return visible[None]


class TopK(LabPolicy):
    """Exact top-k.

    Mechanism: each query head reads the ``budget`` tokens with the highest scores of its query. No
    other choice of this size keeps more attention. It reads all keys: a ceiling, not a method.
    Paper: the ideal of arXiv 2404.11912, table 1 ("Top-K").
    Parameters: ``budget``.
    """

    name = "topk"

    def keep(self, layer, kv_head, query, scores, visible):
        hidden = scores.masked_fill(~visible, float("-inf"))
        chosen = hidden.topk(min(self.sizes.budget, layer.num_tokens), dim=-1, sorted=False).indices
        return torch.zeros_like(hidden, dtype=torch.bool).scatter_(-1, chosen, True)


class ChunkedPolicy(LabPolicy):
    """A policy that serves: first chunk, selected chunks, and everything from the recent chunks on.

    As at level 2, each full pass of the replay makes more chunks candidates, and for every
    ``TOKENS_PER_SELECTION`` tokens after it they are selected by the first one's query.
    """

    selection: ClassVar[type[SelectionPolicy]]

    def keep(self, layer, kv_head, query, scores, visible):
        sizes, keys, keep = self.sizes, layer.keys[kv_head], torch.zeros_like(visible)
        policy, budget = self.selection(), sizes.retrieval_budget
        num_chunks = len(keys) // sizes.chunk_size
        chunks = keys[: num_chunks * sizes.chunk_size].unflatten(0, (num_chunks, -1))
        summaries = {
            kind: kind.reduce(chunks, 1).to(keys.dtype)[None, None] for kind in policy.summaries
        }  # [1, 1, num_chunks, head_dim]
        for row in range(0, layer.num_replayed, sizes.tokens_per_pass):
            end = min(row + sizes.tokens_per_pass, layer.num_replayed)
            # The full pass has computed all tokens before this one.
            num_full = (layer.start + row) // sizes.chunk_size
            num_read, tail = budget.of(num_full), num_full - budget.recent
            for token in range(row, end, TOKENS_PER_SELECTION):
                is_kept = keep.new_ones(num_chunks + 1)
                if num_full > num_read:  # else the context fits the budget
                    among = {kind: numbers[:, :, 1:tail] for kind, numbers in summaries.items()}
                    heads = query[None, None, :, token]
                    best = policy.best_chunks(heads, among, tail - 1, num_read - budget.recent - 1)
                    is_kept[1:tail] = False
                    is_kept[1 + best[0, 0]] = True
                tokens = is_kept.repeat_interleave(sizes.chunk_size)[: layer.num_tokens]
                keep[token:end] = tokens
        return keep[None]


_LAB_ALONE: dict[str, type[LabPolicy]] = {policy.name: policy for policy in (Full, TopK)}


class LabPolicies(Mapping[str, type[LabPolicy]]):
    """Policies by name, in the order of tables.

    Serving policies are loaded on access: a broken one of another package breaks only runs that
    compare it.
    """

    def __getitem__(self, name: str) -> type[LabPolicy]:
        """
        Raises:
            ValueError: another package's policy does not load, is none, or has the name of one of
                the lab.
        """
        if name not in _LAB_ALONE:
            policy = selection.POLICIES[name]
            namespace = {"name": policy.name, "selection": policy, "__doc__": policy.__doc__}
            return type(policy.__name__, (ChunkedPolicy,), namespace)
        if name in selection.POLICIES:
            raise ValueError("the lab has one of that name; rename the other package's")
        return _LAB_ALONE[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*_LAB_ALONE, *selection.POLICIES]))

    def __len__(self) -> int:
        return len({*_LAB_ALONE, *selection.POLICIES})


POLICIES = LabPolicies()
