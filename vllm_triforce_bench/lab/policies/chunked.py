"""Policies that serve, run by the retrieval cache as at level 2."""

from functools import partial
from typing import ClassVar

import numpy as np
import torch

from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION, PassSelection
from vllm_triforce.cache.retrieval_cache import Candidates, RetrievalCache
from vllm_triforce.cache.summaries import ChunkSummaries
from vllm_triforce.selection import SelectionPolicy, Summary
from vllm_triforce_bench.lab.policies.base import LabPolicy


class ChunkedPolicy(LabPolicy):
    """First chunk, selected chunks, and everything from the recent chunks on.

    ``cache/retrieval_cache.py``, which serves requests, selects chunks before full passes of the
    replay, every ``refresh_interval`` passes, with the newest query that the full pass has seen.
    Between two selections the read tokens grow, as at level 2. At an interval of 0,
    ``cache/pass_selection.py`` selects for every ``TOKENS_PER_SELECTION`` tokens after a full pass,
    by the first one's query.
    """

    selection: ClassVar[type[SelectionPolicy]]

    def keep(self, layer, kv_head, query, scores, visible):
        sizes, keep = self.sizes, torch.zeros_like(visible)
        cache = self._cache(layer, kv_head)
        logical_blocks = np.arange(layer.num_tokens // sizes.chunk_size + 1, dtype=np.int32)
        for row in range(0, layer.num_replayed, sizes.tokens_per_pass):
            # The full pass has computed all tokens before this one; queries[:, row] is its newest.
            newest = partial(layer.queries[None, layer.heads(kv_head)].select, 2, row)
            selected = cache.selection("replay", logical_blocks, layer.start + row, newest)
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
        size, keys = self.sizes.chunk_size, layer.keys[kv_head]
        num_full = len(keys) // size
        blocks = keys[: num_full * size].view(num_full, size, -1)

        def block_summaries(ids: torch.Tensor, kind: Summary) -> torch.Tensor:  # [n, 1, head_dim]
            return kind.reduce(blocks[ids], 1)[:, None]

        policy = self.selection()
        summaries = ChunkSummaries(
            policy.summaries,
            1,
            num_full,
            1,
            keys.shape[-1],
            keys.dtype,
            keys.device,
            [block_summaries],
        )
        return RetrievalCache(
            summaries,
            policy,
            size,
            self.sizes.retrieval_budget,
            self.sizes.refresh_interval,
        )


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


def chunked(policy: type[SelectionPolicy]) -> type[ChunkedPolicy]:
    """Make the lab's class of a serving policy, with its name and description."""
    namespace = {"name": policy.name, "selection": policy, "__doc__": policy.__doc__}
    return type(policy.__name__, (ChunkedPolicy,), namespace)
