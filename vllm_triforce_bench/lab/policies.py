"""Policies that serve, and those of the lab alone; CONTRIBUTING.md has the steps to add one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from vllm_triforce import selection
from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION, PassSelection
from vllm_triforce.cache.retrieval_cache import Candidates, RetrievalCache
from vllm_triforce.cache.summaries import ChunkSummaries
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce.selection import SelectionPolicy, Summary
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

    ``cache/retrieval_cache.py`` and ``cache/pass_selection.py``, which serve requests, select for
    every ``TOKENS_PER_SELECTION`` tokens after a full pass of the replay, by the first one's query.
    """

    selection: ClassVar[type[SelectionPolicy]]

    def keep(self, layer, kv_head, query, scores, visible):
        sizes, keep = self.sizes, torch.zeros_like(visible)
        cache = self._cache(layer, kv_head)
        logical_blocks = np.arange(layer.num_tokens // sizes.chunk_size + 1, dtype=np.int32)
        for row in range(0, layer.num_replayed, sizes.tokens_per_pass):
            # The full pass has computed all tokens before this one.
            selected = cache.selection("replay", logical_blocks, layer.start + row)
            is_kept = keep.new_zeros(len(logical_blocks))
            is_kept[selected.tail_start :] = True
            pass_rows = range(row, min(row + sizes.tokens_per_pass, layer.num_replayed))
            step = TOKENS_PER_SELECTION if selected.candidates else len(pass_rows)
            for token in pass_rows[::step]:
                blocks = selected.blocks[0, 0]
                if selected.candidates:
                    blocks = _select_in_pass(cache, blocks, selected.candidates, query[:, token])
                tokens = is_kept.index_fill(0, blocks.long(), True)
                tokens = tokens.repeat_interleave(sizes.chunk_size)[: layer.num_tokens]
                keep[token : pass_rows[-1] + 1] = tokens
        return keep[None]

    def _cache(self, layer, kv_head: int) -> RetrievalCache:
        """Make a retrieval cache of one layer and KV head, with the context's blocks in order."""
        sizes, keys = self.sizes, layer.keys[kv_head]
        num_full = len(keys) // sizes.chunk_size
        blocks = keys[: num_full * sizes.chunk_size].view(num_full, sizes.chunk_size, -1)

        def block_summaries(ids: torch.Tensor, kind: Summary) -> torch.Tensor:  # [n, 1, head_dim]
            return kind.reduce(blocks[ids], 1)[:, None]

        policy = self.selection()
        shape = (1, num_full, 1, keys.shape[-1])
        summaries = ChunkSummaries(
            policy.summaries, *shape, keys.dtype, keys.device, [block_summaries]
        )
        return RetrievalCache(summaries, policy, sizes.chunk_size, sizes.retrieval_budget)


def _select_in_pass(
    cache: RetrievalCache,
    blocks: torch.Tensor,  # [num_selected]
    candidates: Candidates,
    query: torch.Tensor,  # [group, head_dim]
) -> torch.Tensor:  # [num_selected], the first block and those that the query selects
    table = blocks.int()[None, None, None].contiguous()
    selection = PassSelection(cache.policy, {0: candidates}, 1, cache.head_strides)
    selection.begin_pass([0], [1], [0], table)
    selection.select(0, query[None])
    return table[0, 0, 0]


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
